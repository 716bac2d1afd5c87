"""A run in words and numbers: log, metrics, overflows, event files, trackers, page. It imports `launch` and below.
Begin with `interval_report`, which declares every metric.

outcome          what a step gave, read on the host some attempts later
recorded         the values that all ranks have recorded in a step
culprits         parameter, rank and micro-batch behind an overflow
overflows        overflows in words, and when a run gives up
scale_search     the search for the first loss scale, in one line
live_tensors     the tensors of a rank that has run out of memory
interval_report  the metrics of every run: their declarations, and their values of a log interval
readout          what is read of single steps: recorded values, counts, the range by layer
event_file       TensorBoard's event files
metrics          a line on the console, in metrics.jsonl and in TensorBoard
slow_ranks       the rule by which a rank or a node counts as slow
rank_times       each rank's own times, told to the first rank beside the steps
trackers         a thread for each tracker; wandb
prometheus       the newest values in a file for Prometheus
alerts           a program that is told how a run ends
chosen_trackers  the trackers that a configuration chooses
profiling        traces of the steps that are profiled
history          what a run's folder says, but for its events
report           a run afterwards: its page and pictures
"""

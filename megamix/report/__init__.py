"""Reports of a run, while it trains and afterwards.

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
goodput          what the wall time of a run went into
overview         how runs stand, a line for each
plot             curves and maps as pictures
page             page of a run: how it ended, what it learned, where its time went
command          the verbs `plot`, `report` and `status`
"""

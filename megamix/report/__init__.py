"""Reports of a run, while it trains and afterwards.

interval_report  values of single steps become what a log interval says
log_file         a log that no trouble of its disk turns into the end of a run
metrics          a line on the console, in metrics.jsonl and in TensorBoard
trackers         wandb and what plugins add
profiling        traces of the steps that are profiled
plot             curves as pictures
"""

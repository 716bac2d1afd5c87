"""Does a layout train as one rank would? A few steps on real ranks, each judged against the same step in FP64.

layouts      their names and the settings they mean; the size at which they are verified
observe      on every rank of a layout: take steps and write down all that can be compared; the ranks' pieces become
             whole parameters, gradients and states by name
reference    the same step on one rank: in FP64, and in the layout's own precision to know its rounding
judge        every comparison, each within a bound that is derived beside it
command      the verb `verify`: ranks for each layout, and a table
trainer      what is asked of somebody's own training; watch takes its steps on every rank, judge_trainer compares them
hypotheses   which kind of mistake a gradient, a norm or a loss looks like; update_kinds, which kind an update
watched_run  on every rank: a real job, from `run_job` on, and what each attempt read and left behind
data_order   which samples each update of a run read, on which rank
runs         jobs that are interrupted against one that never stopped; the same job in two programs
"""

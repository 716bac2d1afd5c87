"""Is training right? Steps and runs on real ranks, of our layouts or of anybody's own training, each judged against the
same step in FP64.

command      the arguments of `verify`; layout_lines and run_lines start the ranks, and print what became of them
layouts      their names and the settings they mean; the size at which they are verified
observe      on every rank of a layout: take steps and write down all that can be compared; the ranks' pieces become
             whole parameters, gradients and states by name
reference    the same step on one rank: in FP64, and in the training's own precision to know its rounding
verdict      what became of it, and the bounds that every judge shares
judge        every comparison of a layout, each within its bound
hypotheses   which kind of mistake a gradient or a loss looks like; norm_kinds, a norm; update_kinds, an update, and its
             bound
tape         what passes through every module; bisect, which one is the first to be wrong
trainer      what is asked of somebody's own training; watch takes its steps on every rank; judge_trainer,
             judge_buffers and plain_optimizer compare them
watched_run  on every rank: a real job, from `run_job` on, and what each attempt read and left behind
data_order   which samples each update of a run read, on which rank
runs         jobs that are interrupted against one that never stopped; the same job in two programs
"""

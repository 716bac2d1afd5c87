"""The processes of a run and its folder: who starts, holds, watches and ends them. It imports `checkpoint` and below,
and no engine. Begin with `torchrun`.

exit_status  the states at a run's end, their exit statuses, and the errors that end one early
torchrun     torchrun's launcher, but with the exit status of the ranks
warm         a process from which ranks are forked, with all that they need loaded
agent        the launcher of a job's ranks, which starts them again after one was killed
rendezvous   the store in which the ranks of one machine meet, out of reach of other machines
liveness     messages of the ranks beside their collectives
watchdog     the end of a rank when another one is dead or hung
hang         what the ranks' last collectives say after such an end
run_lock     one job at a time in a run's folder
ledger       seconds of a start by what they went into
journal      events of a run's starts, and the sign of life of the start that runs
run_status   how a run stands by its journal, and its restarts without progress
leftovers    what other runs have left in shared memory, and which of it may go
run_folder   names in a run's folder, its owner, its checkpoints in words
"""

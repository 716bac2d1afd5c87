"""A run beside its training: its launcher, its folder's lock, its ranks' signs of life, its end and exit status.

launch      torchrun's launcher, but with the exit status of the ranks
rendezvous  the store in which the ranks of one machine meet, out of reach of other machines
run_lock    one job at a time in a run's folder
console     lines and a progress bar
liveness    messages of the ranks beside their collectives
processes   facts about this host's processes, and a thread that repeats its work
watchdog    the end of a rank when another one is dead or hung
hang        what the ranks' last collectives say after such an end
status      the request to leave, the states at a run's end and their exit statuses
ledger      seconds of a start by what they went into
journal     events of a run's starts, and the sign of life of the start that runs
run_status  how a run stands by its journal, and its restarts without progress
command     the verb `hang`
"""

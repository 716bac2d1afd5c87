"""A run beside its training: its launcher, its folder's lock, its ranks' signs of life, its end and exit status.

launch      torchrun, which ends with the rank's exit status
rendezvous  where one machine's ranks meet, without others
run_lock    one job at a time in a run's folder
console     lines and a progress bar
liveness    messages of the ranks beside their collectives
processes   facts about this host's processes
watchdog    end of a rank when another one is dead or hung
status      the request to leave, `status.json` and the exit status
"""

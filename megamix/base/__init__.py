"""Common ground: it imports no other room of ours. Begin with `console`.

moved         where modules of earlier versions are now
constants     numbers that were tuned by measuring
machine       this machine's cores, memory and arithmetic, and a rank's share of them
signals       what each process does at each signal
processes     facts about this host's processes, and a thread that repeats its work
console       lines and a progress bar
progress      progress of long work, on stderr
durable       files and folders that stay whole in a power cut, and that belong to this run alone
log_file      a log file that grows row by row, and whose disk errors never end the run
git_lfs       pointers of Git LFS in place of large files
axes          the axes of a mesh as data: what the ranks along each have in common
names         parameter names as in the plain model
values        which tensors have values
clock         where the time of a step goes: named spans
live_storage  bytes of live tensors, and their peak
records       values that a forward reports with the step
added_loss    losses that are added to the step's own where they arise
tally         counts that move a vector outside the gradient once a step

Model and engine know the last three, and not each other.
"""

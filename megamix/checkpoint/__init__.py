"""Checkpoints in model space: what the ranks own, saved as boxes of whole parameters, loads on any other layout.

boxes        arithmetic: a flat range of a block as boxes of the full parameter, intersections
tiling       whether boxes cover a parameter, each element once
folder       the names in a folder of checkpoints, and what each says
files        the only calls that change the disk, and the checksum
tensor_file  a safetensors file, streamed
parts        what one rank holds of the run's state, and where it belongs
record       JSON that is checked when read
manifest     the JSON that makes files a checkpoint
together     work that succeeds on every rank or on none
snapshot     the state of one instant, as views or as a copy in the host's memory
save         the commit: fresh folder, files, manifest, rename; and what may be removed after it
saver        saves one after the other, at once or by a thread while training goes on, and removes old ones
verify       a checkpoint found good, or what is wrong with it
fill         its bytes into a rank's memory, verified on the way
load         the newest good checkpoint, into an engine of any layout
pieces       a checkpoint's states piece by piece
diff         what differs between two checkpoints
export_dcp   a checkpoint as a folder of torch.distributed.checkpoint
commands     what `megamix checkpoint` prints
"""

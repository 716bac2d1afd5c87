"""Checkpoints in model space: what the ranks own, saved as boxes of whole parameters, loads on any other layout.

boxes        arithmetic: a flat range of a block as boxes of the full parameter, and whether boxes cover it
folder       the names in a folder of checkpoints, what each says, and the only calls that change the disk
manifest     the JSON that makes files a checkpoint, checked when read
snapshot     what one rank holds of the run's state: views of one instant, or a copy in the host's memory
tensor_file  a safetensors file, streamed
together     work that succeeds on every rank or on none
save         the commit: fresh folder, files, manifest, rename; at once or by a thread while training goes on
verify       a checkpoint found good, or what is wrong with it; its states piece by piece
load         the newest good checkpoint, into an engine of any layout, verified on the way
checkpoints  both for a program of one's own, as one object
export_dcp   a checkpoint as a folder of torch.distributed.checkpoint
actions      what `megamix checkpoint` prints: lists, verdicts, differences
"""

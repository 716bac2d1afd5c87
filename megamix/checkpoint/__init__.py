"""Checkpoints in model space: the ranks save what they own as boxes of whole parameters, which load on any layout. It
imports `mixed_precision`, `config` and below. Begin with `checkpoints`.

boxes         arithmetic: a flat range of a block as boxes of the full parameter, and whether boxes cover a parameter
folder        the names in a folder of checkpoints, the meaning of each, and the only calls that change the disk
manifest      the JSON file that makes a folder a checkpoint, checked when read
snapshot      one rank's part of the run's state: views of one instant, or a copy in the host's memory
tensor_file   a safetensors file, streamed
all_or_none   work that succeeds on every rank or on none
slots         what runs keep in a node's shared memory: names and records
mirror        a rank's share of the state, copied to shared memory after a step, and to a rank on another node
in_memory     the newest state that is whole there, as a checkpoint to go on from
save          the commit: fresh folder, files, manifest, rename; at once or by a thread while training goes on
verify        the check of a checkpoint, which finds it good or lists its problems; its states read box by box
phase         what a new run may have otherwise than the checkpoint that it begins from
load          the newest good checkpoint, loaded into an engine of any layout and verified on the way
checkpoints   saving and loading as one object, for a user's own program
copying       a copy of a checkpoint on another file system
export_dcp    a checkpoint as a folder of torch.distributed.checkpoint
actions       the lines that `megamix checkpoint` prints: lists and verdicts
"""

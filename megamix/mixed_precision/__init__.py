"""The mixed-precision step, one stage per file. None imports one that stands below it.

What is chosen, and what is told:
loss_scale     the power of two that keeps small gradients representable: constant, searched, or by others' rules
headroom       the same, found by measuring
half_states    moments in BF16: when and how they are rounded by chance
optimizers     what every optimizer is made of: settings, groups, an equation
adamw          Adam with decoupled weight decay
nag            gradient descent with Nesterov's momentum
muon           matrices by orthogonalised momentum, all else by AdamW
settings       what a user chooses, and what is refused of it
step           what is under way of a step, and what it tells when it is over
records        what a forward or a loss reports beside its result

Where things lie:
flat_layout    where parameters lie: buckets, optimizer runs, padding (arithmetic only)
matrix_layout  where whole matrices lie, and which rank computes with each (arithmetic only)
flat_buffers   memory of flat buffers, kept, or coming and going
bucket         what the engine shows of a bucket
half_params    the half-precision working copy, of which the module's Parameters are views
passing_params  the same, with memory while a unit computes; who reads it elsewhere is told
master_shard   the FP32 truth: each rank's share of masters and optimizer states; full weights out of it and into it

The stages, in the order in which the data flows:
foreign_params  parameters that a loss reads and the module does not have
half_grads     gradients of backward, summed over micro-batches in flat buffers
grad_reduce    reduce-scatter to the owners while backward runs
grad_stats     one read: sum of squares and max abs; one agreement of all ranks
fused_update   one write: unscale, clip, the optimizer's equation, cast to half
matrix_update  where the optimizer takes whole matrices: momentum, exchange, direction, and back to their owners
param_gather   all-gather of half parameters while the next forward runs
unit_hooks     where a unit's forward and its backward begin and end
unit_gather    in place of param_gather: a unit's half parameters, for its forward and again for its backward
moving_buffers  running statistics, which a step that is skipped leaves as they were
unseen_writes  were half parameters written past the engine? In a few steps, and before weights are saved
examination    on demand: the same step looked at closely
engine         the conductor

Around the engine, on demand:
replicas       is every half parameter, on every rank, still the cast of its master?
culprits       after an overflow: which parameter, rank and micro-batch
"""

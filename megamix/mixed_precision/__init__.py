"""The mixed-precision step, one idea per file. None imports one that stands below it.

What is chosen, and what is told:
loss_scale     the power of two that keeps small gradients representable: constant, searched, or by others' rules
headroom       the same, found by measuring
settings       what a user chooses
step           how far a step is, and what it tells when it is over

Where things lie:
flat_layout    where parameters lie: buckets, optimizer spans, padding (arithmetic only)
matrix_layout  where whole matrices lie, and which rank computes with each (arithmetic only)
storage        memory that is there only while a step needs it; who reads what is gone is told
update_slice   what an update is told: a slice of a bucket's shard, its group, and what the step has decided
row_stats      one read of a sum of gradients, apart or while the sum is made
bucket         one flat buffer: gradients, their sum, masters and states, half parameters, and what is on its way
observer       how anybody looks into a step

Optimizers:
optimizers     what every optimizer is made of: settings, groups, an equation, and the update of bucket after bucket
half_states    moments in BF16: when and how they are rounded by chance
adamw          Adam with decoupled weight decay
nag            gradient descent with Nesterov's momentum
muon           matrices by orthogonalised momentum, all else by AdamW

What an engine is built from:
refusals       what is refused, and whether all ranks were given the same
census         what a model has to train
links          whom a rank talks to
weights        weights into the engine and out of it
module_guard   does the module keep its parameters, each in its place?

The stages, in the order in which the data flows:
foreign_params  parameters that a loss reads and the module does not have
grad_reduce    gradients into their buckets by hooks, and these to their owners while backward runs
grad_stats     one agreement of all ranks: overflow, norm, loss
fused_update   one write: unscale, clip, the optimizer's equation, cast to half
unseen_writes  were half parameters written past the engine? In a few steps, and before weights are saved
param_gather   all-gather of half parameters while the next forward runs
unit_hooks     where a unit's forward and its backward begin and end
unit_gather    in place of param_gather: a unit's half parameters, for its forward and again for its backward
moving_buffers  running statistics, which a step that is skipped leaves as they were
examination    on demand: the same step looked at closely
engine         the conductor
"""

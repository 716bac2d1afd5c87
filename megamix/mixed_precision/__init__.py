"""The mixed-precision step, one idea per file. It imports `comm`, `settings` and `base`, and knows no model. Begin with
`engine`. No file imports one that stands below it.

Choices and results:
loss_scale     the power of two that keeps small gradients representable: constant, searched, or another trainer's rule
headroom       the loss scale that is found by measuring
settings       the user's choices
step           how far a step is, its result, and numbers on their way to the host

Layout and memory:
flat_layout    places of parameters: buckets, optimizer spans, padding (arithmetic only)
storage        memory that exists only while a step needs it; reading a freed parameter raises
update_slice   an update's arguments: a slice of a bucket's shard, its group, and the step's decisions
row_stats      statistics of a sum of gradients, in one read or while the sum is computed
bucket         one flat buffer: gradients, their sum, masters and states, half parameters, and their transfers
observer       the base class of everything that looks into a step

Optimizers and guards:
optim   the optimizers, in a room of their own
guards  what would train wrong in silence, refused

Parts from which an engine is built:
census   the parameters that a model has to train, and the links to the ranks that have a part in them
weights  weights into the engine and out of it

The stages, in the order in which the data flows:
grad_reduce    gradients into their buckets by hooks, and buckets to their owners while backward runs
grad_stats     one agreement of all ranks: overflow, norm, loss; and the multiplier that follows from it
fused_update   one write: unscale, clip, the optimizer's equation, cast to half
unit_hooks     hooks where a module's forward begins and ends, and where a unit's backward begins
param_gather   all-gather of half parameters while the next forward runs
unit_gather    in place of param_gather: a unit's half parameters, for its forward and again for its backward
module_state   running statistics and counts, which a skipped step leaves as they were
examination    on demand: a close look at the same step
engine         the conductor
average        an average of the weights, which an evaluation reads in their place
"""

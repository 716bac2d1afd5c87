"""The mixed-precision step, one stage per file, listed in the order in which the data flows.

settings       what a user chooses, and what a step tells
flat_layout    where parameters lie: buckets, optimizer runs, owners (arithmetic only)
master_shard   the FP32 truth: each rank's share of master weights and optimizer states
half_params    the half-precision working copy, of which the module's Parameters are views
loss_scale     the power of two that keeps small gradients representable: constant, or found by a search
headroom       the same, found by measuring
loss_scale_presets  the same by the rules of torch, Megatron-LM and DeepSpeed
half_grads     gradients of backward, summed over micro-batches in flat buffers
grad_reduce    reduce-scatter to the owners while backward runs
grad_stats     one read: sum of squares and max abs; one agreement of all ranks
optimizers     the settings and pure equations of AdamW and Nesterov
fused_update   one write: unscale, clip, the optimizer's equation, cast to half
param_gather   all-gather of half parameters while the next forward runs
guards         what is refused when the engine is built, and later changes of the module
weights        full FP32 weights by the module's own names, out of the masters and back
fingerprint    every rank was given the same model and settings
engine         the conductor
examination    on demand: the same step looked at closely
replicas       on demand: is every half parameter, on every rank, still the cast of its master?
culprits       after an overflow: which parameter, rank and micro-batch
"""

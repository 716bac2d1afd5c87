"""Optimizers. They import the layout and the buckets of `mixed_precision`, no stage of the step. Begin with `adamw`.

schedules      learning rates and other settings by update
optimizer      the parts of every optimizer: settings, groups, an equation, and the update of bucket after bucket
half_states    moments in BF16: when and how they are rounded by chance
adamw          Adam with decoupled weight decay
nag            gradient descent with Nesterov's momentum
matrix_layout  places of whole matrices, and the rank that computes with each (arithmetic only)
muon           matrices by orthogonalised momentum, all else by AdamW
"""

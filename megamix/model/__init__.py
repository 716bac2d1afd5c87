"""A decoder-only transformer as plain modules: it knows nothing of optimizers, loss scales or ranks.

`transformer` is read first; `layers` are its leaves, `context` is what a token sees (packed sequences, text so far),
`ops` decides how each operation is computed, `wide` computes half tensors in FP32 on a CPU, `cross_entropy` is head and
loss, `recompute` trades operations for memory, `generation` samples text, `sizes` counts.
"""

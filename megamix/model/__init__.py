"""Decoder-only models as plain modules: they know nothing of optimizers, loss scales or ranks.

Read `decoder` first: it is the base class of all families. `transformer` is GPT-2, Llama, Mistral and Qwen; `family`
finds a family by its name. `layers` has the leaf modules, which say how they are drawn and divided and what they cost.
`context` says what a token sees (its document, the text so far). `ops` decides how each operation is computed; `wide`
computes half tensors in FP32 on a CPU. `cross_entropy` is head and loss, `recompute` trades operations for memory,
`initial` draws first weights, `generation` samples text, `sizes` derives sizes from a configuration. `formats` and
`config_json` know Hugging Face's names of tensors and keys.
"""

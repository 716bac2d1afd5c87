"""Decoder-only models as plain modules: they know nothing of optimizers, loss scales or ranks.

`decoder` is read first: what all families are made of. `transformer` is GPT-2, Llama, Mistral and Qwen, `family` finds
a family by its name; `layers` are the leaves, which say how they are drawn, divided and what they cost; `context` is
what a token sees (packed sequences, text so far), `ops` decides how each operation is computed, `wide` computes half
tensors in FP32 on a CPU, `cross_entropy` is head and loss, `recompute` trades operations for memory, `generation`
samples text, `sizes` holds what follows from a configuration; `formats` and `config_json` are Hugging Face's names of
tensors and keys.
"""

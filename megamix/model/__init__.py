"""Decoder-only models as plain modules. It imports `config`, `data` and below: nothing of ranks, engines, loss scales.
Begin with `decoder`.

language_model      the base class of every family: what a job asks of a model
decoder             the base class of families of our own layers: read it first
transformer         GPT-2, Llama, Mistral, Qwen, Gemma and others: blocks by the settings of one section
feed_forward        the feed-forward part of its blocks
experts             experts in its place, and the router that chooses them
attention           the attention of its blocks: of several heads, or of latents
transformers_model  text models of transformers, by their own modules
family              the family that a configuration names, and its size
layers              the leaf modules: how they are drawn and divided, and what they cost
context             what a token sees: its document, the text so far
span                the positions of a sequence that one of several ranks computes, and the keys that they see
ops                 how each operation is computed
wide                operations on half tensors of a CPU, computed in FP32
fp8                 products in FP8, of chosen layers
cross_entropy       head and loss in one function
recompute           tensors that are computed again to save memory
initial             first weights
generation          sampling of text
sizes               sizes that follow from a configuration
formats             Hugging Face's names of a family's tensors and keys
config_json         the formats of the built-in models
"""

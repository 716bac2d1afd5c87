"""One model on several ranks: which block of each parameter a rank holds, and what travels between layers.

placements       arithmetic: the block of every parameter, by its name
borders          what travels where a divided layer begins and ends, with its gradient
tensor_parallel  a plain model becomes this rank's part of it
vocabulary_slopes  cross entropy of logits that are divided over the vocabulary
build            the model of a job on this rank, with the initial weights that one process would draw
"""

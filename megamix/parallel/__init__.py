"""One model on several ranks: which block of each parameter a rank holds, and what travels between layers.

placements       arithmetic: the block of every parameter, by its name
borders          what travels where a divided layer begins and ends, with its gradient
tensor_parallel  a plain model becomes this rank's part of it
vocabulary_slopes  cross entropy of logits that are divided over the vocabulary
stages           a pipeline's stages: which layers each has, and the part of the model that a rank holds
passes           how a step's micro-batches pass through the model, without a pipeline
pipeline_parallel  and with one: torch's schedules, each backward pass told to the engine
build            the model of a job on this rank, with the initial weights that one process would draw
"""

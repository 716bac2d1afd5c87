"""One model on several ranks: which block of each parameter a rank holds, and what travels between layers.

borders          what travels where a divided layer begins and ends, with its gradient
tensor_parallel  a plain model becomes this rank's part of it: the block of every parameter, by its name; the loss too
stages           a pipeline's stages: which layers each has, and the part of the model that a rank holds
passes           how a step's micro-batches pass through the model, without a pipeline
pipeline_parallel  and with one: torch's schedules, each backward pass told to the engine
build            the model of a job on this rank, with the initial weights that one process would draw
"""

"""One model on several ranks: the block of each parameter that a rank holds, and the traffic between layers. It imports
`model`, `mixed_precision` and below; these two meet only here and above. Begin with `build`.

borders             the collectives at the beginning and end of a divided layer, in forward and backward
tensor_parallel     a plain model becomes this rank's part of it: a block of every parameter and of the loss
context_parallel    attention of one rank's positions with the keys and values of all ranks
expert_parallel     rows of one rank's tokens at the ranks that hold their experts
stages              a pipeline's stages: the layers of each, and the part of the model that a rank holds
micro_batch_runner  the passes of a step's micro-batches through the model, without a pipeline
pipeline_parallel   the passes with a pipeline: torch's schedules, which report each backward pass to the engine
build               the model of a job on this rank, with the initial weights that one process would draw
"""

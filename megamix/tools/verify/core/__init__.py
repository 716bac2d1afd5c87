"""The parts that every judge shares: the right step, bounds, and the kinds of mistakes. They import no judge. Begin
with `reference`.

layout          a layout's name and the settings it means
own_size        the size at which a job is verified: short sequences, and windows that end within them
verdict         a layout's result, and the bounds that every judge shares
table           the printed form of results
reference       the same step on one rank: in FP64, and in the training's own precision to know its rounding
hypotheses      kinds of mistakes in a gradient or a loss
norm_kinds      kinds of mistakes in a norm
update_kinds    kinds of mistakes in an update, and its bound
tape            tensors that pass through every module, and parameters that FSDP2 divides
bisect          the first module that is wrong
observed_step   on every rank of our engine: all of a step that can be compared; the ranks' parts become whole
                parameters, gradients and states by name
choices         the experts that routers choose: kept on every rank, and replayed by the reference
"""

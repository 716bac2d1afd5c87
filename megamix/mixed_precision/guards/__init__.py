"""What would train wrong in silence, refused. They import `optim` and what stands above it.
Begin with `refusals`.

refusals        refused arguments, and the check that all ranks were given the same
module_guard    the check that the module keeps its parameters, each in its place
foreign_params  the graph of a loss, and parameters in it that the module does not have
unseen_writes   the search for writes past the engine, in a few steps and before weights are saved
"""

"""Tools beside the product: they read, count, measure and judge it.

Of the product only a room's `command.py` imports them, and passes their lines to a job as a function.

plan    memory of a job, before it starts
verify  steps and runs against FP64
audit   dtypes of every number in a step, and the precision lost
bench   measurements
doctor  fitness of this machine
ranks   real ranks on this machine, for all tools
"""

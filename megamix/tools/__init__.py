"""Tools beside the product: they read, count, measure and judge it.

Only a room's `command.py` imports them: it hands in the lines that they tell of a job.

plan    memory of a job, before it starts
verify  steps and runs against FP64
audit   dtypes of every number in a step, and what is lost
bench   measurements
doctor  fitness of this machine
ranks   real ranks on this machine, for all of them
"""

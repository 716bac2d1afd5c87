"""Tools beside the product: they read, count, measure and judge it. They import any room but `cli`, and only `cli`
imports them: a job gets their lines through a function that it passes on. Begin with `plan`.

plan    memory of a job, before it starts
verify  steps and runs against FP64
audit   dtypes of every number in a step, and the precision lost
bench   measurements
doctor  fitness of this machine
ranks   real ranks on this machine, for all tools
"""

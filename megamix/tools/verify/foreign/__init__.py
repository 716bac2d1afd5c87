"""Somebody's own training, step by step. They import `core`. Begin with `trainer`.

trainer_lines    starts the ranks, and prints a row for each number of them
trainer          methods that the training must have; facts read from the usual wrappers without asking
watch            on every rank: take its steps, and write down everything that can be compared
judge_trainer    every comparison of its steps
judge_buffers    every comparison of its buffers
plain_optimizer  lr, options, master and states against torch's optimizer on one rank; bounds: core/update_kinds
"""

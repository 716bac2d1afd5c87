"""Somebody's own training, step by step.

trainer_lines    starts the ranks, and prints a row for each number of them
trainer          methods that the training must have; facts read from the usual wrappers without asking
watch            on every rank: take its steps, and write down everything that can be compared
judge_trainer    every comparison of its steps; judge_buffers, of its buffers
plain_optimizer  the same update by torch's optimizer on one rank
"""

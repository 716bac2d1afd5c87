"""Somebody's own training, step by step.

trainer_lines    starts the ranks, and prints a row for each number of them
trainer          what is asked of the training; what is read of the usual wrappers without asking
watch            on every rank: take its steps, and write down what can be compared
judge_trainer    every comparison of its steps; judge_buffers, of its buffers
plain_optimizer  the same update by torch's optimizer on one rank
"""

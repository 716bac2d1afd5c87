"""Bugs that users of known systems met, each planted as its thread describes it, and the answer of `verify` to each.

bugs         an entry, and the table of all
foreign      a training by hand, right, whose parts the bugs replace
gradients, scaling, updates    bugs in it, or in torch's wrappers
engine       bugs in our engine
__main__     `python -m tests.tools.verify.catalogue` runs all, and writes answers.md and docs/verify_reference.md
"""

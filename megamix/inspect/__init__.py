"""Inspection of an engine between steps, for the host.

records    what a forward or a loss reports beside its result
replicas   is every half parameter, on every rank, still the cast of its master?
culprits   after an overflow: which parameter, rank and micro-batch
overflows  overflows in words, and when a run gives up
"""

"""Inspection of an engine between steps, for the host.

records       values that a forward or a loss reports beside its result
replicas      the check that every half parameter, on every rank, is still the cast of its master
culprits      parameter, rank and micro-batch behind an overflow
overflows     overflows in words, and when a run gives up
scale_search  the search for the first loss scale, in one line
"""

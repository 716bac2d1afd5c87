"""Inspection of an engine between steps, for the host.

outcome       what a step gave, read on the host some attempts later
records       the values that all ranks have recorded in a step
replicas      the check that every half parameter, on every rank, is still the cast of its master
culprits      parameter, rank and micro-batch behind an overflow
overflows     overflows in words, and when a run gives up
live_tensors  the tensors of a rank that has run out of memory
scale_search  the search for the first loss scale, in one line
"""

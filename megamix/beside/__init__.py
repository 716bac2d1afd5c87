"""What a forward gives beside its result. Model and engine know these, and not each other.

records     values that are reported with the step
added_loss  losses that are added to the step's own where they arise
tally       counts that move a vector outside the gradient once a step
"""

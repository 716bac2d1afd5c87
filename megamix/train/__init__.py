"""The job: it puts data, model and the mixed-precision engine together, and trains.

compiler  torch's compiler, loaded before the ranks meet
batches   this rank's part of global batches, for training and for evaluation
trainer   the training loop, top to bottom
joined    this rank among the others: meeting, holding the run's folder, watching, leaving
job       a whole job on this rank, top to bottom
command   the verb
"""

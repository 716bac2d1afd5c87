"""The job: it puts data, model and the mixed-precision engine together, and trains.

compiler  torch's compiler, loaded before the ranks meet
check     problems of a job, before any time is spent
job_size  what a job takes of memory and disk
judge     whether a job may go on from a checkpoint
ranks     this rank among the others: meeting, leaving
run       a start of a run in its folder: held, counted, watched, ended
batches   this rank's part of global batches, for training and for evaluation
engine    the engine, as the configuration says
job       everything that the loop works with, built once from the configuration
trainer   the training loop, top to bottom
main      a whole job on this rank
command   the verb
"""

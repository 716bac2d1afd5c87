"""The job, from a configuration to its final weights: it puts data, model and engine together, trains, saves, goes on.
It imports every room but `hf`, `tools` and `cli`. Begin with `main`.

Before a run, and at its start:
compiler      torch's compiler, loaded before the ranks meet
objects       objects from their sections: optimizer, loss scale, number formats, loader
corpus        the corpus: sources of samples, and what is wrong with their files
own_code      versions and hashes of the code that a process runs
batch_plan    which batch is tried next, and which are left out
run_record    the record of a run in a checkpoint, and whether a run can have saved it
resume_rules  changes since a checkpoint, and those that make another run
second_phase  what a new run keeps of another run's checkpoint, in words
least_memory  the least memory that a rank holds
check         problems of a job, before any time is spent
job_size      what a job takes of memory and disk
judge         whether a job may go on from a checkpoint
ranks_agree   comparison of what each rank was started with, before the model is built
ranks         this rank among the others: meeting, leaving
run           a start of a run in its folder: held, counted, watched, ended

The run:
resume         the checkpoint that a run goes on from, and its way into the engine
replicas       the check that every half parameter, on every rank, is still the cast of its master
copies         copies of checkpoints elsewhere, made beside training
mirrors        what a run keeps in shared memory, and which rank keeps whose share
checkpointing  when a run saves, and the lines of the log on it
results        weights and a sample of text, for use elsewhere
batches        this rank's part of global batches, for training and for evaluation
engine         the engine, as the configuration says
job            everything that the loop works with, built once from the configuration
trainer        the training loop, top to bottom
main           a whole job on this rank
"""

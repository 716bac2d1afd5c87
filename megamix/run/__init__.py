"""A run's record and folder: its files, and the checkpoints from which it may go on.

run_folder      names in a run's folder, its owner, its checkpoints in words
least_memory    the least memory that a rank holds
ranks_agree     comparison of what each rank was started with, before the model is built
own_code        versions and hashes of the code that a process runs
batch_plan      which batch is tried next, and which are left out
run_record      the record of a run in a checkpoint, and whether a run can have saved it
resume_rules    changes since a checkpoint, and those that make another run
resume          the checkpoint that a run goes on from, and its way into the engine
copies          copies of checkpoints elsewhere, made beside training
checkpointing   when a run saves, and the lines of the log on it
results         weights and a sample of text, for use elsewhere
"""

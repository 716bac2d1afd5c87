"""A run's record and folder: what it leaves behind, and what it may go on from.

run_folder      the names in a run's folder, and whose it is; what is wrong with a job, found before it starts
least_memory    what a rank holds at least, and whether this machine has that
ranks_agree     before the model is built: was each rank started with the same?
own_code        which code a process runs
batch_plan      which batch is tried next, and which are left out
run_record      what a checkpoint keeps of its run, and whether some run can have saved it
resume_rules    may a run go on from a checkpoint, and what has changed since?
resume          the checkpoint that a run goes on from, and its way into the engine
checkpointing   when a run saves, and what it says of it
results         weights and a sample of text, for use elsewhere
"""

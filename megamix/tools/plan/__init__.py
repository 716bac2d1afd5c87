"""Memory and time of a job, before anything is launched. It imports `model`, `mixed_precision`, `parallel`, `train` and
below. Begin with `memory_plan` and `time_model`.

memory_plan      memory of a rank: bytes held, and the peak of each phase
engine_memory    bytes that an engine holds, and that each stage needs on top
matrix_memory    memory and traffic of the update of whole matrices
activations      memory of forward and backward
stand_ins        operations without memory, by which these are counted
pipeline_memory  memory of a pipeline's rank
expert_rows      rows of experts if tokens choose unevenly
limits           limits from flags
advice           changes for a job that does not fit
report           the table, and whether it fits

time_work        the work of a step, as the time model reads it
time_job         the work of a configured job
time_hardware    rates of machines, from `hardware/*.toml` or as doctor measured them
time_constants   constants of the time model
time_model       time of a step from its parts
time_band        how far a predicted time may be off
time_line        a run's step, planned and measured, for its log
calibrate        constants from runs of one's own
ridge            least squares with priors, by which the constants were fitted

layouts          ways to divide a job among GPUs, with the time of each
least_memory     fewest bytes that a layout needs
layout_report    the table of the fastest layouts that fit
layout_picture   these as bars, which show what a step's time goes into
"""

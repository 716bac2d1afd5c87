"""Measurements: `megamix bench`. It imports `ranks`, `train` and below. Begin with `benches`.

benches        benches by name
train_bench    whole training steps beside torch's ways
step_bench     parts of a step
host_bench     processor time on the host per step
update_bench   the optimizer's step alone
startup_bench  from the start to the end of the first step
sides          sides of a comparison: ours, and torch's own ways
layout_sides   sides in which ranks divide the model
ranks          ranks of a bench, one set for each side
report         medians and quartiles, in print and as JSON
"""

"""Judgement of training: steps and runs on real ranks, of our layouts or of anybody's own training, each against the
same step in FP64. Three judges import one core, and nothing of each other. Begin with `core`.

core     a step in FP64, the bounds, the kinds of mistakes, and every comparison of a step of our engine
layouts  steps of our layouts on a made-up text: `--layouts`
foreign  steps of somebody's own training: `--trainer`
runs     whole jobs: `--runs` and `--twice`
"""

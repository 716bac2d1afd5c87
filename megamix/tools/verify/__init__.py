"""Judgement of training: steps and runs on real ranks, of our layouts or of anybody's own training.

Each is judged against the same step in FP64. Three tools stand on one core, and import nothing of each other.

command  the arguments of `verify`
core     a step in FP64, the bounds, the kinds of mistakes, and every comparison of a step of our engine
layouts  steps of our layouts on a made-up text: `--layouts`
foreign  steps of somebody's own training: `--trainer`
runs     whole jobs: `--runs` and `--twice`
"""

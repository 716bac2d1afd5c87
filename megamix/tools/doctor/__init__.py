"""Fitness of this machine to train: `megamix doctor`. It imports `bench`, `verify` and below. Begin with `finding`.

finding      findings, and the way checks run
host         readings of the host without its cards, and whether they are as expected
cards        NVIDIA cards, as the driver and torch describe them
ranks        measurements on every rank
measured     these beside what is expected
nodes        comparison of all ranks of torchrun: `--nodes`
first_light  the first run on a GPU, part by part: `--first-light`
first_parts  its parts that no other verb has
"""

"""Fitness of this machine to train: `megamix doctor`."""

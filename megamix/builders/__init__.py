"""Builders of a job's objects from its configuration; each object gets only its own section.

objects  model's stages, optimizer, loss scale, engine, runner of micro-batches
data     sources of samples, and what is wrong with their files
"""

"""Builders of a job's objects from its configuration; each object gets only its own section.

objects  optimizer, loss scale, number formats
data     the corpus: sources of samples, and what is wrong with their files
"""

"""Layouts of our engine, step by step.

layout_lines  starts the ranks, and prints a row for each layout
observe       on every rank of a layout: train on a made-up text, and write down each step
judge         each step by the core's comparisons, and whether as many were applied as had to be
"""

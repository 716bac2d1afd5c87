"""Layouts of our engine, step by step. They import `core`. Begin with `layout_lines`.

layout_lines    starts the ranks, and prints a row for each layout
observe         on every rank of a layout: train on a made-up text, and write down each step
judge_steps     every comparison of these steps, each within its bound
judge_matrices  comparisons of Muon's directions
judge_routing   comparisons of what routers do outside of gradients
"""

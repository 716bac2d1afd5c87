"""Whole jobs, from `run_job` on.

run_lines    starts the ranks, and prints a row for each run
watched_run  on every rank: a real job, and everything that each attempt read and left behind
data_order   samples that each update of a run read, on which rank
judge_runs   jobs that are interrupted against one that never stopped; the same job in two programs
"""

"""Whole jobs, from `run_job` on.

run_lines    starts the ranks, and prints a row for each run
watched_run  on every rank: a real job, and what each attempt read and left behind
data_order   which samples each update of a run read, on which rank
judge_runs   jobs that are interrupted against one that never stopped; the same job in two programs
"""

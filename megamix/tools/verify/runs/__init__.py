"""Whole jobs, from `run_job` on. They import `core`. Begin with `run_lines`.

watched_run  on every rank: a real job, and everything that each attempt read and left behind
run_lines    starts the ranks; a row for a job that is interrupted, against one that never stopped, and for the same job
             in two programs
"""

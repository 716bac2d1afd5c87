"""Tools beside the product: they read, count, measure and judge it.

Only a room's `command.py` imports them: it hands in the lines that they tell of a job.
"""

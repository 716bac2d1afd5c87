"""Tools beside the product: they read, count, measure and judge it.

No room of a job imports them: the command line hands in the lines that they tell of a job.
"""

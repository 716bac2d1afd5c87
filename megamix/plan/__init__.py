"""The memory of a job, counted before anything is launched, and compared with what it takes. No room of
a job imports this: the command line hands it in.
"""

"""The memory of a job, counted before anything is launched, and compared with what it takes."""

"""Memory of a job, counted before anything is launched, and compared with measured memory."""

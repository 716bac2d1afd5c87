"""A run beside its training: its launcher, its folder's lock, its ranks' signs of life, its end and exit status."""

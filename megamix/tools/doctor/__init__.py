"""Is this machine fit to train? `megamix doctor`."""

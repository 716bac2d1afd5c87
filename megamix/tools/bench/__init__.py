"""Measurements: `megamix bench`."""

"""Measuring: `megamix bench`."""

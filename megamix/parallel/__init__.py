"""Layouts in which a rank does not hold the whole model: plain modules divided, and who runs what when."""

"""A run beside its training: who starts it, who holds its folder, which ranks live, who ends it, how it ended."""

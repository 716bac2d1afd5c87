"""How ranks talk: who is in the data-parallel group, and the collectives of a step."""

"""Communication between ranks: their topology, the collectives of a step, messages on the host, and the step's
timeline.
"""

"""To import this makes simulated NCCL answer wrong: the last rank's part is missing in each sum."""

from tests.gpu import nccl

_right = nccl._sum
nccl._sum = lambda parts, opts: _right(parts[:-1], opts)

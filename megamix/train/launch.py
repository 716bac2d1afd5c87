"""`python -m megamix.train.launch`: torchrun with its own arguments, ending with the rank's exit status.

torchrun itself ends with 1 whatever its ranks ended with, and a scheduler could not tell a run that gave up from one
whose node failed.
"""

from __future__ import annotations

import sys

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main


def launch(arguments: list[str]) -> int:
    """Start the ranks and wait. Returns 0, the exit status of the first rank that failed, or 1 for a signal."""
    try:
        main(arguments)
    except ChildFailedError as error:
        status: int = error.get_first_failure()[1].exitcode
        return max(status, 1)
    return 0


if __name__ == "__main__":
    sys.exit(launch(sys.argv[1:]))

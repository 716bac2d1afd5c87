"""`python -m megamix` is the `megamix` command."""

import signal
import sys

# Ctrl-C while a rank loads its modules leaves no traceback: nothing has begun. The run then handles the signal itself;
# other verbs do so from their beginning on. nohup's choice stays.
if sys.argv[1:2] == ["train"] and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from megamix.cli import main  # see above
from megamix.supervise.console import end_process

# Guarded, because a worker process started by forkserver or spawn imports this module again.
if __name__ == "__main__":
    end_process(main())

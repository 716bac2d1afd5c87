"""`python -m megamix` is the `megamix` command."""

import signal
import sys

# Ctrl-C while a rank loads its modules leaves no traceback: nothing has begun. The run then handles the signal itself;
# other verbs do so from their beginning on. nohup's choice stays.
if sys.argv[1:2] == ["train"] and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

try:
    from megamix.cli import main  # see above
    from megamix.supervise.console import end_process
except ModuleNotFoundError as error:
    if (error.name or "").startswith("megamix"):
        raise
    sys.exit(
        f"megamix: {sys.executable} (Python {sys.version.split()[0]}) has no {error.name}; run `. .venv/bin/activate`, "
        "which ./launch/install.sh makes, or install megamix in this Python, 3.11 or newer: pip install -e ."
    )

# Guarded, because a worker process started by forkserver or spawn imports this module again.
if __name__ == "__main__":
    end_process(main())

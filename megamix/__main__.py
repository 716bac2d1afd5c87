"""`python -m megamix` is the `megamix` command."""

import sys

from megamix.base.signals import ctrl_c_kills

if sys.argv[1:2] == ["train"]:  # until the run notes signals; other verbs do so from their beginning on
    ctrl_c_kills()

try:
    from megamix.base.console import end_process
    from megamix.cli.verbs import main
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

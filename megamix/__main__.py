"""`python -m megamix` is the `megamix` command."""

from megamix.cli import main

# Guarded, because a worker process started by forkserver or spawn imports this module again.
if __name__ == "__main__":
    raise SystemExit(main())

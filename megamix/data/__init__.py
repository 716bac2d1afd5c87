"""Text to tokens to batches.

`prepare` runs once: by a `tokenizer` (and its kin), it writes a `token_file` with its `token_index`. Training opens
that: `source` cuts its windows in the order of `sampler`, which mixes sources, too; `loader` fetches batches ahead of
need. `steady_file` tells a file that changes while it is read.
"""

import importlib
from typing import Any


def import_extra(package: str, extra: str, *submodules: str, what: str = "") -> Any:
    """Import a package that is no dependency, with its submodules; `what` it is for begins the message.

    Raises: ValueError with the line that installs it.
    """
    try:
        for name in submodules:
            importlib.import_module(f"{package}.{name}")
        return importlib.import_module(package)
    except ImportError as error:
        raise ValueError(f"{what}the Python package {package!r} is not installed; {installing(extra)}") from error


def installing(extra: str) -> str:
    """Return what a user does to get an extra: megamix is in no package index, and the name there is another's."""
    return f"run pip install -e '.[{extra}]' in the checkout of megamix"

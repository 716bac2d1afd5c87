"""Text to tokens to batches.

`prepare` runs once, before training. It encodes text by a `tokenizer` (or `tokenizer_bulk`, `tokenizer_kinds`; all are
a `text_tokenizer`) and writes a `token_file` with its `token_index`. Training opens these files: `source` cuts windows
from them in the order of `sampler`, which also mixes sources; `loader` reads batches ahead. `steady_file` finds out a
file that changes while it is read.
"""

import importlib
from typing import Any


def import_extra(package: str, extra: str, *submodules: str, what: str = "") -> Any:
    """Import an optional package and its submodules. `what`: the beginning of the error, which says who needs it.

    Raises: ValueError with the command that installs it.
    """
    try:
        for name in submodules:
            importlib.import_module(f"{package}.{name}")
        return importlib.import_module(package)
    except ImportError as error:
        raise ValueError(f"{what}the Python package {package!r} is not installed; {installing(extra)}") from error


def installing(extra: str) -> str:
    """Return the instruction that installs an extra. It installs from a checkout: megamix is in no package index, and
    the name there belongs to another package.
    """
    return f"run pip install -e '.[{extra}]' in the checkout of megamix"

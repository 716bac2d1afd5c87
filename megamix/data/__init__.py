"""Text to tokens to batches.

Before training, once:
prepare          text becomes token files
text_tokenizer   the interface of every tokenizer
tokenizer        tokenizers of a tokenizer.json; the file of any tokenizer is opened here
tokenizer_bulk   the same ids, several times faster
tokenizer_kinds  bytes, and SentencePiece

The files between:
token_file       ids of all documents, in Megatron's format
token_index      places of the documents in them

In training:
steady_file      a file that changes while it is read is found out
source           windows of tokens from these files, from mixtures of them, or made up
sampler          the order of samples, over several sources too
loader           batches, read ahead
"""

import importlib
from typing import Any


def import_extra(package: str, extra: str, *submodules: str, what: str = "") -> Any:
    """Import an optional package and its submodules. `what`: the beginning of the error, which names the caller that
    needs the package.

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

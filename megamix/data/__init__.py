"""Text to tokens to batches. It imports `base` and `plugins`. Begin with `source`.

Before training, once:
prepare          text becomes token files
text_tokenizer   the interface of every tokenizer
tokenizer        tokenizers of a tokenizer.json; the file of any tokenizer is opened here
tokenizer_bulk   the same ids, several times faster
tokenizer_kinds  bytes, and SentencePiece
tokenizer_files  what lies beside a tokenizer's file: settings, special tokens, templates
json_table       tables in JSON files, as these settings are

The files between:
token_file       ids of all documents, in Megatron's format
token_index      places of the documents in them

In training:
steady_file      a file that changes while it is read is found out
source           windows of tokens from these files, from mixtures of them, or made up
best_fit         windows of whole documents, by their lengths
sampler          the order of samples, over several sources too
deal             the parts of packed sequences that context-parallel ranks compute
loader           batches, read ahead
"""

import importlib
import shlex
from importlib.metadata import requires
from pathlib import Path
from typing import Any

DISTRIBUTION = "megamix-train"  # PyPI's megamix is another project
_ROOT = Path(__file__).parents[2]  # a checkout, or a folder of installed packages


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
    """Return the instruction that installs an extra: from the checkout if megamix runs from one, otherwise the packages
    by their names, for megamix is in no package index.
    """
    if (_ROOT / "pyproject.toml").is_file():
        return f"run pip install -e '.[{extra}]' in the checkout of megamix"
    needed = [line.split(";")[0].strip() for line in requires(DISTRIBUTION) or [] if f'extra == "{extra}"' in line]
    return f"run pip install {shlex.join(needed)}"

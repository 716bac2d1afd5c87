"""Limits from flags, as argparse reads them: `--memory` in bytes, `--gpus` in numbers; and the most ranks that are
planned.
"""

import re
from argparse import ArgumentTypeError

UNITS = {"k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
MOST_RANKS = 16384
# Part of a GPU's memory for its context, the workspaces of cuBLAS and cuDNN, and NCCL. Not measured.
RESERVED = 2 * 2**30


def bytes_of(memory: str) -> int:
    """Return a size such as "80GiB" in bytes."""
    match = re.fullmatch(r"([0-9]+\.?[0-9]*|\.[0-9]+) *([kMGT]i?)B?", memory)
    if match is None:
        raise ArgumentTypeError(f"got {memory!r}, must be a number and a unit; write --memory 80GiB")
    return int(float(match[1]) * UNITS[match[2]])


def gpus_of(gpus: str) -> list[int]:
    """Return the numbers of GPUs in a text such as "96" or "8..1024", of which powers of two are meant."""
    match = re.fullmatch(r"([0-9]{1,9})(?:\.\.([0-9]{1,9}))?", gpus)
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    powers = [2**power for power in range(MOST_RANKS.bit_length())]
    numbers = [first] if first == last else [power for power in powers if first <= power <= last]
    if not (numbers and 1 <= first <= last <= MOST_RANKS):
        raise ArgumentTypeError(
            f"got {gpus!r}, must be a number from 1 to {MOST_RANKS}, or two of them with a power of two between them; "
            "write --gpus 8..1024"
        )
    return numbers

"""Seconds and memory of best-fit packing: `python -m tests.data.packing_figures DOCUMENTS SEQ_LEN LAW` prints them for
documents of made-up lengths, whose tokens are a hole in a file.
"""

import os
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from megamix.data.best_fit import BestFitSource
from megamix.data.source import TokenFileSource, TokenSpan
from megamix.data.token_file import TokenFile, bin_path, idx_path
from megamix.data.token_index import write_index

# Lengths of documents, by how many, a window's tokens and a generator.
LAWS = {
    "web": lambda count, size, rng: np.maximum(1, np.exp(rng.normal(6.0, 1.15, count))).astype(np.int64),  # and books
    "over half": lambda count, size, rng: size // 2 + rng.integers(1, size // 100 + 2, count),
    "0.6 and 0.3": lambda count, size, rng: rng.choice([6 * size // 10, 3 * size // 10], count),
    # Two of the longer ones leave room for none of the others, which fill a window with one of the longer.
    "0.4 and 0.3": lambda count, size, rng: rng.choice([4 * size // 10, 3 * size // 10], count, p=[1 / 3, 2 / 3]),
    "any": lambda count, size, rng: rng.integers(2, size + 1, count),
}


def write_hole(prefix, lengths):
    """Write token files of documents of these lengths; all tokens are 0."""
    with tempfile.TemporaryFile() as kept, open(idx_path(prefix), "wb") as index:
        kept.write(lengths.astype("<i4").tobytes())
        write_index(index, np.dtype("<u2"), kept)
    with open(bin_path(prefix), "wb") as tokens:
        tokens.truncate(2 * int(lengths.sum()))


def _peak_gib():
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(status.split("VmHWM:")[1].split()[0]) / 2**20


def _timed(call):
    begun = time.perf_counter()
    return call(), time.perf_counter() - begun


def main(count, seq_len, law, folder):
    prefix = Path(folder) / "hole"
    if not os.fork():  # another process, for its memory does not count
        write_hole(prefix, LAWS[law](count, seq_len + 1, np.random.default_rng(1)))
        os._exit(0)
    os.wait()
    imports, keys = _peak_gib(), {"seq_len": seq_len, "vocab_size": 2**16, "seed": 1, "packed": True}
    file, opened_s = _timed(lambda: TokenFile(prefix))
    source, planned_s = _timed(lambda: BestFitSource([TokenSpan.whole(file)], **keys))
    _, sorted_s = _timed(lambda: source.read(range(1)))
    peak, documents = _peak_gib() - imports, TokenFileSource([TokenSpan.whole(file)], **keys)
    print(
        f"{count:.0e} documents, {file.num_tokens / 1e9:.2f} G tokens, {law}, seq_len {seq_len}: padding "
        f"{source.padding:.4%}, cut by documents {documents.cut_documents():.1%}; opened in {opened_s:.1f} s, planned "
        f"in {planned_s:.1f} s, sorted in {sorted_s:.1f} s, {peak:.2f} GiB beyond imports"
    )
    assert source.cut_documents() == 0


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        main(int(float(sys.argv[1])), int(sys.argv[2]), sys.argv[3], made)

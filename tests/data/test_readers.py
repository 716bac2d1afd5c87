"""Every kind of file gives the same documents, in order and with their places, however the file is cut into pieces, in
bounded memory.
"""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megamix.data.prepare.corpus import input_corpus, named_corpus
from megamix.data.prepare.plan import make_plan, read_piece
from megamix.data.prepare.records import Document
from tests.conftest import FULL

TEXTS = [f"document {number} " + "wörter " * (number % 40) for number in range(500)]


def write(folder, kind):
    """Write the texts as one file or dataset. Return the value of --input."""
    lines = "".join(json.dumps({"id": number, "text": text}) + "\n" for number, text in enumerate(TEXTS)).encode()
    path = folder / f"x.{kind}"
    if kind in ("jsonl", "lines.json"):
        path.write_bytes(lines)
    elif kind == "json":
        path.write_text(json.dumps([json.loads(line) for line in lines.splitlines()], ensure_ascii=False))
    elif kind == "objects.json":
        path.write_text("\n".join(json.dumps(json.loads(line), indent=1) for line in lines.splitlines()))
    elif kind == "json.gz":
        path.write_bytes(gzip.compress(b"[" + b",".join(lines.splitlines()) + b"]"))
    elif kind == "jsonl.gz":
        path.write_bytes(gzip.compress(lines))
    elif kind == "jsonl.zst":
        import zstandard

        path.write_bytes(zstandard.compress(lines))
    elif kind == "parquet":
        import pyarrow.parquet

        table = pyarrow.table({"id": range(500), "text": pyarrow.array(TEXTS).dictionary_encode()})
        pyarrow.parquet.write_table(table, path, row_group_size=70)
    elif kind == "arrow":
        import pyarrow

        table = pyarrow.table({"text": pyarrow.array(TEXTS, pyarrow.large_string())})
        with pyarrow.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=70)
    else:
        import datasets

        datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(str(path), num_shards=2)
    return str(path)


@pytest.mark.parametrize("ending", ["txt.gz", "md.gz", "txt.zst", "gz"])
def test_a_compressed_text_is_one_document(tmp_path, ending):
    import zstandard

    text = "\n".join(TEXTS)
    compress = zstandard.compress if ending.endswith("zst") else gzip.compress
    (tmp_path / f"x.{ending}").write_bytes(compress(text.encode()))
    (tmp_path / f"y.tar.{ending.rpartition('.')[2]}").write_bytes(compress(b"x.txt" + bytes(512)))  # an archive's head
    corpus = input_corpus([str(tmp_path)])
    assert [file.name for file in corpus.files] == [f"x.{ending}"]
    (piece,) = make_plan(corpus).pieces
    assert [record for _, record in read_piece(piece, "text")] == [Document(0, text)]


KINDS = ["jsonl", "jsonl.gz", "jsonl.zst", "json", "json.gz", "lines.json", "objects.json", "parquet", "arrow"]


@pytest.mark.parametrize("kind", [*KINDS, "saved by datasets"])
def test_every_kind_gives_the_same_documents_however_it_is_cut(tmp_path, kind):
    corpus = input_corpus([write(tmp_path, kind)])
    for piece_bytes in (1, 1000, 10_000, 2**30):
        plan = make_plan(corpus, piece_bytes)
        records = [record for piece in plan.pieces for _, record in read_piece(piece, "text")]
        assert [record.text for record in records if isinstance(record, Document)] == TEXTS
        if len(corpus.files) == 1:
            assert [record.number for record in records] == list(range(1, 501))
    assert len(plan.pieces) == 1


def test_a_dataset_of_a_builder_is_read_from_the_files_that_it_loaded(tmp_path, monkeypatch):
    import datasets

    write(tmp_path, "parquet")
    dataset = datasets.load_dataset("parquet", data_dir=str(tmp_path), split="train", cache_dir=str(tmp_path / "cache"))
    asked = []

    def load_dataset(name, split):
        asked.append((name, split))
        if name == "nobody/nothing":
            raise FileNotFoundError("no such dataset")
        return dataset

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    plan = make_plan(input_corpus(["hf:some/thing"], "train"))
    records = [record for piece in plan.pieces for _, record in read_piece(piece, "text")]
    assert [record.text for record in records if isinstance(record, Document)] == TEXTS
    with pytest.raises(ValueError, match=r"is no whole split on the disk; save it by datasets' save_to_disk"):
        input_corpus(["hf:some/thing"], "train[:10%]")
    with pytest.raises(ValueError, match="--input hf:nobody/nothing --split train: no such dataset"):
        input_corpus(["hf:nobody/nothing"])
    assert asked[0] == ("some/thing", "train")


@pytest.mark.parametrize("contents", [b"two", b"three"])
def test_a_file_that_changes_between_plan_and_reading_is_refused(tmp_path, contents):
    (tmp_path / "a.txt").write_bytes(b"one")
    plan = make_plan(input_corpus([str(tmp_path)]))
    stat = (tmp_path / "a.txt").stat()
    (tmp_path / "a.txt").write_bytes(contents)
    if len(contents) == stat.st_size:
        os.utime(tmp_path / "a.txt", ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    with pytest.raises(ValueError, match=r"a\.txt changed while it was being read; run prepare again"):
        list(read_piece(plan.pieces[0], "text"))


@pytest.mark.parametrize("package", ["zstandard", "pyarrow"])
def test_a_missing_package_is_answered_with_the_pip_line(tmp_path, monkeypatch, package):
    corpus = input_corpus([write(tmp_path, "jsonl.zst" if package == "zstandard" else "parquet")])
    monkeypatch.setitem(sys.modules, package, None)  # makes the import fail
    with pytest.raises(ValueError, match=rf"'{package}' is not installed; run pip install -e '\.\[data\]' in"):
        [list(read_piece(piece, "text")) for piece in make_plan(corpus).pieces]


_PEAK = """
import sys
from pathlib import Path
from megamix.data.prepare.corpus import input_corpus
from megamix.data.prepare.prepare_corpus import Request, prepare_corpus
from megamix.data.prepare.tokenizer_choice import TokenizerChoice
choice = TokenizerChoice(sys.argv[2])
request = Request(tokenizer=choice, valid_fraction=0, num_workers=1, piece_bytes=2**20)
prepare_corpus(input_corpus([sys.argv[1]]), Path(sys.argv[1] + ".out"), request)
# Not getrusage: its peak begins with that of the process this one was forked from.
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "json"])
def test_memory_does_not_grow_with_the_corpus(tmp_path, kind):
    """Twice the text, or with --full a GB of it: about the same peak, and under 500 MB."""
    line = (json.dumps({"text": "some words of a document " * 160}) + (",\n" if kind == "json" else "\n")).encode()
    peaks = []
    for mebibytes in (12, 1024 if FULL else 24):  # the first fills what is read ahead, too
        path = tmp_path / f"{mebibytes}.{kind}"
        with gzip.open(path, "wb", 1) if kind == "jsonl.gz" else path.open("wb") as file:
            file.write(b"[" if kind == "json" else b"")
            for _ in range(mebibytes):
                file.write(line * (2**20 // len(line)))
            file.write(b"{}]" if kind == "json" else b"")
        done = subprocess.run(
            [sys.executable, "-c", _PEAK, str(path), "bytes"], capture_output=True, text=True, check=True
        )
        peaks.append(int(done.stdout) * 1024)
    small, large = peaks
    assert large < 500e6
    # The corpus is 12 MB larger; or 1,000 MB, and its index is read in stretches of up to a million documents.
    assert large < small + (24 if FULL else 9) * 2**20


_PEAK_OF_ALL = """
import os, sys, threading, time
from pathlib import Path
from megamix.data.prepare.corpus import input_corpus
from megamix.data.prepare.prepare_corpus import Request, prepare_corpus
from megamix.data.prepare.tokenizer_choice import TokenizerChoice

def resident(pid):
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        return int(status.partition("VmRSS:")[2].split()[0]) * 1024
    except (OSError, IndexError):  # it has just ended
        return 0

def watch():
    global peak
    while True:
        children = "".join(path.read_text() for path in Path("/proc/self/task").glob("*/children"))
        peak = max(peak, sum(map(resident, ["self", *children.split()])))
        time.sleep(0.02)

if __name__ == "__main__":
    peak = 0
    threading.Thread(target=watch, daemon=True).start()
    request = Request(tokenizer=TokenizerChoice("train", 32000), valid_fraction=0.1, num_workers=2)
    prepare_corpus(input_corpus([sys.argv[1]]), Path(sys.argv[1] + ".out"), request)
    print(peak)
"""


@pytest.mark.skipif(not FULL, reason="a GB of text, some minutes: with --full")
def test_a_gigabyte_with_a_tokenizer_that_is_trained_takes_under_500_megabytes_in_all_processes(tmp_path):
    files = [file for name in ("stdlib", "torch") for file in named_corpus(name).files]
    lines = [json.dumps({"text": Path(file.path).read_text(encoding="utf-8")}) + "\n" for file in files]
    with (tmp_path / "a.jsonl").open("w") as file:
        while file.tell() < 2**30:
            file.writelines(lines)
    (tmp_path / "peak.py").write_text(_PEAK_OF_ALL)  # a file: a spawned process imports what started it
    command = [sys.executable, str(tmp_path / "peak.py"), str(tmp_path / "a.jsonl")]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert 200e6 < int(done.stdout) < 500e6

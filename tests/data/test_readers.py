"""Every kind of file gives the same documents, in order and with their places, however the file is cut into pieces, in
bounded memory. Whoever prepares texts from the web: bad records of every kind are left out and listed by place and
reason; the records beside them are kept.
"""

import gzip
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from megamix.base.progress import ProgressLine
from megamix.data.prepare.corpus import input_corpus, named_corpus
from megamix.data.prepare.pieces import PieceReport, documents_of
from megamix.data.prepare.plan import make_plan, read_piece
from megamix.data.prepare.prepare_corpus import Request, prepare_corpus
from megamix.data.prepare.split import Split
from megamix.data.prepare.tokenizer_choice import TokenizerChoice
from tests.conftest import FULL

TEXTS = [f"document {number} " + "wörter " * (number % 40) for number in range(500)]


def compressed(ending, content):
    if ending.endswith("gz"):
        return gzip.compress(content, 1)
    import zstandard

    return zstandard.ZstdCompressor(write_checksum=True).compress(content)


def write(folder, kind):
    """Write the texts, and a null amid them, as one file or dataset. Return the value of --input."""
    import datasets
    import pyarrow.parquet

    texts = [*TEXTS[:250], None, *TEXTS[250:]]
    rows = [{"id": number, "text": text} for number, text in enumerate(texts)]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    array = json.dumps(rows, ensure_ascii=False)
    contents = {
        "jsonl": lines.encode(),
        "json": array.encode(),
        "json.gz": compressed("gz", array.encode()),
        "jsonl.gz": compressed("gz", lines.encode()),
        "jsonl.zst": compressed("zst", lines.encode()),
    }
    path = folder / f"x.{kind}"
    if kind in contents:
        path.write_bytes(contents[kind])
    elif kind == "parquet":
        table = pyarrow.table({"id": range(501), "text": pyarrow.array(texts).dictionary_encode()})
        pyarrow.parquet.write_table(table, path, row_group_size=70)
    elif kind == "arrow":
        table = pyarrow.table({"text": pyarrow.array(texts, pyarrow.large_string())})
        with pyarrow.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=70)
    else:
        datasets.Dataset.from_dict({"text": texts}).save_to_disk(str(path), num_shards=2)
    return str(path)


def read(plan):
    return [(number, record) for piece in plan.pieces for _, number, record in read_piece(piece)]


@pytest.mark.parametrize("ending", ["txt.gz", "txt.zst", "gz"])
def test_a_compressed_text_is_one_document(tmp_path, ending):
    text = "\n".join(TEXTS)
    (tmp_path / f"x.{ending}").write_bytes(compressed(ending, text.encode()))
    archive = tmp_path / f"y.tar.{ending.rpartition('.')[2]}"
    archive.write_bytes(compressed(ending, b"x.txt" + bytes(512)))  # its head
    corpus = input_corpus([str(tmp_path)])
    assert [file.name for file in corpus.files] == [f"x.{ending}"]
    assert read(make_plan(corpus, ProgressLine())) == [(1, text)]


@pytest.mark.parametrize(
    "kind", ["jsonl", "jsonl.gz", "jsonl.zst", "json", "json.gz", "parquet", "arrow", "saved by datasets"]
)
def test_every_kind_gives_the_same_documents_however_it_is_cut(tmp_path, kind):
    corpus = input_corpus([write(tmp_path, kind)])
    for piece_bytes in (1, 1000, 10_000, 2**30):
        plan = make_plan(corpus, ProgressLine(), piece_bytes=piece_bytes)
        records = read(plan)
        assert [record for _, record in records if record] == TEXTS
        assert records[250][1] == ""
        if len(corpus.files) == 1:
            assert [number for number, _ in records] == list(range(1, 502))
    assert len(plan.pieces) == 1


def test_a_dataset_of_a_builder_is_read_from_the_files_that_it_loaded(tmp_path, monkeypatch):
    import datasets

    write(tmp_path, "parquet")
    dataset = datasets.load_dataset("parquet", data_dir=str(tmp_path), split="train", cache_dir=str(tmp_path / "cache"))
    load = mock.Mock(return_value=dataset)
    monkeypatch.setattr(datasets, "load_dataset", load)
    records = read(make_plan(input_corpus(["hf:some/thing"], "train"), ProgressLine()))
    assert [record for _, record in records if record] == TEXTS
    load.assert_called_with("some/thing", split="train")
    with pytest.raises(ValueError, match=r"is no whole split on the disk; save it by datasets' save_to_disk"):
        input_corpus(["hf:some/thing"], "train[:10%]")
    load.side_effect = FileNotFoundError("no such dataset")
    with pytest.raises(ValueError, match="--input hf:nobody/nothing --split train: no such dataset"):
        input_corpus(["hf:nobody/nothing"])


@pytest.mark.parametrize("contents", [b"two", b"three"])
def test_a_file_that_changes_between_plan_and_reading_is_refused(tmp_path, contents):
    path = tmp_path / "a.txt"
    path.write_bytes(b"one")
    plan = make_plan(input_corpus([str(tmp_path)]), ProgressLine())
    before = path.stat().st_mtime_ns
    path.write_bytes(contents)
    os.utime(path, ns=(before, before + (contents == b"two")))
    with pytest.raises(ValueError, match=r"a\.txt changed while it was being read; run prepare again"):
        read(plan)


@pytest.mark.parametrize("package", ["zstandard", "pyarrow"])
def test_a_missing_package_is_answered_with_the_pip_line(tmp_path, monkeypatch, package):
    corpus = input_corpus([write(tmp_path, "jsonl.zst" if package == "zstandard" else "parquet")])
    monkeypatch.setitem(sys.modules, package, None)  # makes the import fail
    with pytest.raises(ValueError, match=rf"'{package}' is not installed; run pip install -e '\.\[data\]' in"):
        read(make_plan(corpus, ProgressLine()))


PEAK = """
import json, sys, threading, time
from pathlib import Path
from megamix.data.prepare.corpus import input_corpus
from megamix.data.prepare.prepare_corpus import Request, prepare_corpus
from megamix.data.prepare.tokenizer_choice import TokenizerChoice

def in_memory(pid, key):
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        return int(status.partition(key)[2].split()[0]) * 1024
    except (OSError, IndexError):  # it has just ended
        return 0

def watch():
    global peak
    while True:
        children = "".join(path.read_text() for path in Path("/proc/self/task").glob("*/children"))
        peak = max(peak, sum(in_memory(pid, "VmRSS:") for pid in ["self", *children.split()]))
        time.sleep(0.02)

if __name__ == "__main__":
    path, tokenizer, settings = sys.argv[1], *map(json.loads, sys.argv[2:])
    peak = 0
    if settings["num_workers"] > 1:
        threading.Thread(target=watch, daemon=True).start()
    request = Request(tokenizer=TokenizerChoice(*tokenizer), **settings)
    prepare_corpus(input_corpus([path]), Path(path + ".out"), request)
    # Not getrusage: its peak begins with that of the process this one was forked from.
    print(max(peak, in_memory("self", "VmHWM:")))
"""


def peak(path, tokenizer, **settings):
    """Return the most memory that a prepare takes, in bytes."""
    program = path.with_name("peak.py")  # a file: a spawned process imports what started it
    program.write_text(PEAK)
    command = [sys.executable, program, path, json.dumps(tokenizer), json.dumps(settings)]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    return int(subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout)


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
        peaks.append(peak(path, ["bytes"], valid_fraction=0, num_workers=1, piece_bytes=2**20))
    small, large = peaks
    assert large < 500e6
    # The corpus is 12 MB larger; or 1,000 MB, and its index is read in stretches of up to a million documents.
    assert large < small + (24 if FULL else 9) * 2**20


@pytest.mark.skipif(not FULL, reason="a GB of text, some minutes: with --full")
def test_a_gigabyte_with_a_tokenizer_that_is_trained_takes_under_500_megabytes_in_all_processes(tmp_path):
    files = [file for name in ("stdlib", "torch") for file in named_corpus(name).files]
    lines = [json.dumps({"text": Path(file.path).read_text(encoding="utf-8")}) + "\n" for file in files]
    with (tmp_path / "a.jsonl").open("w") as file:
        while file.tell() < 2**30:
            file.writelines(lines)
    assert 200e6 < peak(tmp_path / "a.jsonl", ["train", 32000], valid_fraction=0.1, num_workers=2) < 500e6


GOOD = b'{"text": "good"}\n'
# The line, which stands second of three, and what the reason says.
BAD_LINES = [
    (b"hello", "no JSON: Expecting value"),
    (b'{"text": "a",}', "no JSON: "),
    (b'{"text": "a"} {"text": "b"}', "no JSON: Extra data"),
    (b'["a"]', "no JSON object but a list"),
    (b'{"content": "a", "id": 1}', "no key 'text' (keys: content, id; --text-key names another)"),
    (b"{}", "no key 'text' (keys: none; --text-key names another)"),
    (b'{"text": true}', "is true or false, not a string"),
    (b'{"text": {"en": "a"}}', "is an object, not a string"),
    (b'{"text": "K\xe4se"}', "not UTF-8: byte 0xe4 at 11"),
    (b'{"text": "a\\ud800b"}', "holds half a surrogate pair at character 1"),
    (b'\xef\xbb\xbf{"text": "a"}', "no JSON: "),  # a byte order mark in the middle
    (b'{"text": "%s"}' % (b"a" * 50), "longer than 40 bytes"),
    (b'{"text": "a", "x": "%s"}' % (b"b" * 100), "a record longer than 80 bytes"),
]


@pytest.fixture
def short_limits(monkeypatch):
    monkeypatch.setattr("megamix.data.prepare.json_records._LONGEST_RECORD", 80)
    monkeypatch.setattr("megamix.data.prepare.records.LONGEST_DOCUMENT", 40)


def read_texts(path):
    """Return (documents, bad records)."""
    report = PieceReport()
    pieces = make_plan(input_corpus([str(path)]), ProgressLine()).pieces
    texts = [document.text for piece in pieces for document in documents_of(piece, Split(0, 0), report)]
    return texts, report.left_out


@pytest.mark.parametrize(("line", "reason"), BAD_LINES)
def test_a_bad_line_or_element_is_left_out_with_its_number_and_reason(tmp_path, short_limits, line, reason):
    array = b"[" + GOOD + b"," + line + b", " + GOOD + b"]"
    for name, unit, content in (("jsonl", "line", GOOD + line + b"\n" + GOOD), ("json", "record", array)):
        path = tmp_path / f"x.{name}"
        path.write_bytes(content)
        texts, (bad,) = read_texts(path)
        assert texts == ["good", "good"]
        assert (bad["path"], bad[unit]) == (str(path), 2)
        assert reason in bad["reason"]


@pytest.mark.parametrize(
    "content",
    [
        b'[{"text": "a"}, {"text": "b"',
        b'[{"text": "a"}] no JSON',
        b'{\n"text": "a"}\n{\n"text": "b"\n',
        b'[{"text": "a"}, {"text": "%s' % (b"b" * 100),
    ],
)
def test_of_an_array_that_does_not_end_what_came_before_is_kept(tmp_path, short_limits, content):
    (tmp_path / "x.json").write_bytes(content)
    found, (bad,) = read_texts(tmp_path / "x.json")
    assert (found, bad["record"]) == (["a"], 2)
    assert "the rest of the file cannot be read: " in bad["reason"]


@pytest.mark.parametrize(
    ("kind", "content", "texts"),
    [
        (
            "json",
            b'[{"text": "a, [b] {c} \\"d\\" \\\\"}, {"text": "e", "x": [{"text": "f"}, 1]}]',
            ['a, [b] {c} "d" \\', "e"],
        ),
        ("json", b'\xef\xbb\xbf [\r\n{"text": "a"}\r\n,\n{"text": "b"}\n] \n', ["a", "b"]),
        ("json", b'\n{\r\n "text": "a", "x": {"text": "c"}}{\n "text": "b"}\n', ["a", "b"]),
        ("json", b'{"text": "a"}\n{"text": "b"}', ["a", "b"]),
        ("json", b"[]", []),
        ("jsonl", GOOD + b"\n  \t\n" + GOOD, ["good", "good"]),  # blank lines
        ("jsonl", b'\xef\xbb\xbf{"text": "first"}\r\n' + GOOD, ["first", "good"]),  # a byte order mark, CR LF
        ("jsonl", b'{"text": "no end"}', ["no end"]),
        ("jsonl", b"", []),
    ],
)
def test_odd_but_right_files_are_read(tmp_path, kind, content, texts):
    (tmp_path / f"x.{kind}").write_bytes(content)
    assert read_texts(tmp_path) == (texts, [])


# Nothing to compress: Zstandard gives a block of 128 KiB whole or not at all.
HASHES = [hashlib.sha512(b"%d" % number).hexdigest() for number in range(9000)]
LINES = "".join(f'{{"text": "{text}"}}\n' for text in HASHES).encode()
DAMAGE = {
    "cut in the middle": lambda content: content[: len(content) // 2],
    "with a changed byte": lambda content: content[:-40] + bytes([content[-40] ^ 0xFF]) + content[-39:],
    "that is not compressed": lambda _: LINES,
    "with rubbish behind": lambda content: content + b"rubbish",
}


@pytest.mark.parametrize("ending", ["gz", "zst"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_of_a_damaged_compressed_file_the_whole_records_are_kept(tmp_path, ending, damage):
    records, text = tmp_path / f"x.json.{ending}", tmp_path / f"x.txt.{ending}"
    for path in (records, text):
        path.write_bytes(DAMAGE[damage](compressed(ending, LINES)))
    texts, bad = read_texts(records)
    if damage == "that is not compressed":
        assert bad[-1]["reason"].startswith("not compressed as its name says: ")
    else:
        assert bad[-1]["line"] >= len(texts)
        assert "the rest of the file cannot be read: " in bad[-1]["reason"]
    assert (bad[-1]["num_bytes"], bad[-1]["whole_file"]) == (records.stat().st_size, True)
    assert texts == HASHES[: len(texts)] or damage == "with a changed byte"
    assert len(texts) > 1000 or damage == "that is not compressed"
    texts, (bad,) = read_texts(text)
    assert (texts, bad["path"]) == ([], str(text))
    assert bad["reason"].startswith(("the file cannot be read: ", "not UTF-8", "not compressed as"))


@pytest.mark.parametrize("ending", ["gz", "zst"])
def test_several_compressed_members_are_one_file(tmp_path, ending):
    path = tmp_path / f"x.jsonl.{ending}"
    path.write_bytes(compressed(ending, GOOD) + compressed(ending, b"") + compressed(ending, GOOD))
    assert read_texts(path) == (["good", "good"], [])


@pytest.mark.parametrize(("content", "reason"), [(b"K\xe4se", "not UTF-8"), (b"a" * 50, "longer than 40 bytes")])
def test_a_bad_file_of_text_is_listed_by_its_path(tmp_path, short_limits, content, reason):
    (tmp_path / "bad.txt").write_bytes(content)
    (tmp_path / "good.txt").write_text("good")
    texts, (bad,) = read_texts(tmp_path)
    assert texts == ["good"]
    assert (bad["path"], bad["whole_file"]) == (str(tmp_path / "bad.txt"), True)
    assert reason in bad["reason"]


def _write_table(path, rows):
    """Write a column of strings, of any bytes."""
    import pyarrow.parquet

    column = pyarrow.array(rows, pyarrow.binary())
    strings = pyarrow.Array.from_buffers(pyarrow.string(), len(rows), column.buffers())
    table = pyarrow.table({"id": list(range(len(rows))), "text": strings})
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(table, path)
    else:
        with pyarrow.ipc.new_stream(path, table.schema) as writer:
            writer.write_table(table)


@pytest.mark.parametrize("ending", ["parquet", "arrow"])
def test_a_bad_row_of_a_table_costs_no_other_and_a_damaged_table_is_one(tmp_path, short_limits, ending):
    path = tmp_path / f"x.{ending}"
    _write_table(path, [b"one", None, "zwölf".encode(), b"K\xe4se", b"", b"a" * 50, b"seven"])
    texts, bad = read_texts(path)
    assert texts == ["one", "zwölf", "seven"]
    assert [line["row"] for line in bad] == [4, 6]
    assert [line["reason"][:9] for line in bad] == ["not UTF-8", "longer th"]
    content = path.read_bytes()
    for damaged in (content[:10], b"PAR1" + b"\xff" * (len(content) - 8) + content[-4:]):
        path.write_bytes(damaged)
        texts, bad = read_texts(path)
        assert (texts, [line["path"] for line in bad]) == ([], [str(path)])


@pytest.mark.parametrize("ending", ["parquet", "arrow"])
def test_a_column_that_is_no_text_is_the_request_s_mistake(tmp_path, ending):
    import pyarrow.parquet

    def refused(message, text_key):
        request = Request(tokenizer=TokenizerChoice("bytes"), valid_fraction=0, text_key=text_key)
        with pytest.raises(ValueError, match=message + r".* by --text-key"):
            prepare_corpus(input_corpus([str(tmp_path)]), tmp_path / "out", request)

    _write_table(tmp_path / f"x.{ending}", [b"one"])
    refused(r"has no column 'content' \(columns: id, text\)", "content")
    refused("holds int64", "id")
    pyarrow.parquet.write_table(pyarrow.table({"text": [["a", "b"]]}), tmp_path / "x.parquet")
    refused(r"holds list<.*>, not strings; make a row of each string \(pandas: explode\('text'\)\)", "text")


def test_more_bad_records_than_the_limit_stop_the_run_and_fewer_do_not(tmp_path):
    (tmp_path / "text").mkdir()
    for name in ("a", "b"):
        (tmp_path / "text" / f"{name}.jsonl").write_bytes(GOOD + b'{"body": 1}\n' + GOOD)

    def prepared(limit):
        choice = TokenizerChoice("bytes")
        limits = {"max_bad_records": limit, "allow_lost": 100}
        request = Request(tokenizer=choice, valid_fraction=0, num_workers=1, piece_bytes=1, **limits)
        return prepare_corpus(input_corpus([str(tmp_path / "text")]), tmp_path / "out", request)

    def listed(name, key):
        return [json.loads(line)[key] for line in (tmp_path / name / "bad_records.jsonl").read_text().splitlines()]

    for limit in (0, 1):
        told = rf"more than --max-bad-records {limit} bad .*a.jsonl line 2: no key 'text'.* higher limit"
        with pytest.raises(ValueError, match=told):
            prepared(limit)
        assert not (tmp_path / "out").exists()
        assert listed("out.partial", "line") == [2] * (limit + 1)
    assert prepared(2).manifest["num_bad_records"] == 2
    assert listed("out", "path") == [str(tmp_path / "text" / name) for name in ("a.jsonl", "b.jsonl")]

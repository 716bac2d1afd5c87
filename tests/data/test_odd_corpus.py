"""prepare reads every text of odd files, which public reports tell of, to the byte and in order. It counts what it
leaves out in files and bytes, with the reason.
"""

import bz2
import gzip
import io
import json
import struct

import pyarrow as pa
import pyarrow.parquet
import pytest
import zstandard

from megamix.base.progress import ProgressLine
from megamix.data.prepare.corpus import input_corpus
from megamix.data.prepare.faults import fault_of
from megamix.data.prepare.plan import make_plan
from megamix.data.prepare.prepare_corpus import Request, prepare_corpus
from megamix.data.prepare.tokenizer_choice import TokenizerChoice
from megamix.data.token_file import TokenFile
from megamix.plugins import READERS

BOM = b"\xef\xbb\xbf"
LONG = "a long line " * 20_000
LOST_POINTERS = {"pointer.txt": 5000, "pointer.jsonl.gz": 7000, "pointer.parquet": 268_435_456}
SKIPPABLE = struct.pack("<II", 0x184D2A50, 4) + bytes(4)


def records(*texts):
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


def zst(content, **params):
    params = zstandard.ZstdCompressionParameters.from_level(1, write_checksum=1, **params)
    compressor = zstandard.ZstdCompressor(compression_params=params).compressobj()
    return compressor.compress(content) + compressor.flush()


def pointer(name):
    return f"version https://git-lfs.github.com/spec/v1\noid sha256:{0:064x}\nsize {LOST_POINTERS[name]}\n".encode()


def parquet(column, **settings):
    file = io.BytesIO()
    pyarrow.parquet.write_table(pa.table({"id": list(range(len(column))), "text": column}), file, **settings)
    return file.getvalue()


def arrow(new, *batches):
    file = io.BytesIO()
    tables = [pa.table({"text": batch}) for batch in batches]
    with new(file, tables[0].schema) as writer:
        for table in tables:
            writer.write_table(table)
    return file.getvalue()


def whole(content, reason):
    """Return the loss of a whole file."""
    return content, [], [(reason, len(content), True)]


# By name: the content, the documents that must be in, and what must be told as lost: reason, bytes, whether the file.
# The losses of a record within a lost file are listed, but count once.
TEXTS = {
    "README": (b"no ending", ["no ending"], []),
    "a b.txt": (b"a space", ["a space"], []),
    "array.json": (b'[{"text": "one, [a] {b}"},\n {"x": {"text": "no"}, "text": "two"}]', ["one, [a] {b}", "two"], []),
    "array.json.gz": (gzip.compress(b'[{"text": "packed"}]'), ["packed"], []),
    "bad.jsonl": (
        records("first") + b'hello\n["a"]\n{"text": null}\n{"text": 1}\n{"text": "K\xe4se"}\n' + records("last"),
        ["first", "", "last"],
        [
            ("no JSON", 6, False), ("no JSON object", 6, False),
            ("the value of 'text' is a number", 12, False), ("not UTF-8", 17, False),
        ],
    ),
    "blank.jsonl": (b"\n" + records("blank") + b"  \n\n", ["blank"], []),
    "bom.jsonl": (BOM + records("mark"), ["mark"], []),
    "bom.json": (BOM + b'[{"text": "mark of an array"}]', ["mark of an array"], []),
    "bom.txt": (BOM + b"mark of a text", ["mark of a text"], []),
    "bom.txt.gz": (gzip.compress(BOM + b"mark within"), ["mark within"], []),
    "code.jl": (b"f(x) = 2x\n", ["f(x) = 2x\n"], []),
    "crlf.jsonl": (records("carriage").replace(b"\n", b"\r\n"), ["carriage"], []),
    "crlf.md": (b"one\r\ntwo\r\n", ["one\r\ntwo\r\n"], []),
    "cut.json": (c := b'[{"text": "kept"}, {"text": "l', ["kept"], [("the rest of the file", len(c), True)]),
    "cut.jsonl.gz": (c := gzip.compress(records("k", "l"))[:-8], ["k", "l"], [("the rest of the", len(c), True)]),
    "cut_bad.jsonl.gz": (
        c := gzip.compress(b"hello\n" + records("k"))[:-8], ["k"], [("no JSON", 6, False), ("the rest", len(c), True)],
    ),
    "cut.jsonl.zst": (c := zst(records("k", "l"))[:-1], ["k", "l"], [("the rest of the file", len(c), True)]),
    "cut.txt.gz": whole(gzip.compress(b"half a text")[:-8], "the file cannot be read"),
    "empty.jsonl": (b"", [], []),
    "empty.txt": (b"", [""], []),
    "empty.txt.gz": (b"", [""], []),
    "empty_text.jsonl": (records("", "beside"), ["", "beside"], []),
    "false.json.gz": whole(b"<html>404</html>", "not compressed as its name says"),
    "false.txt.zst": whole(gzip.compress(b"gzip"), "not compressed as its name says"),
    "half.jsonl": (b'{"text": "a\\ud800b"}\n', [], [("the value of 'text' holds half a surrogate", 21, False)]),
    "latin.txt": whole("Käse".encode("latin-1"), "not UTF-8: byte 0xe4 at 1"),
    "lines.json": (records("x", "y"), ["x", "y"], []),
    "long.jsonl": (records(LONG, "after it"), [LONG, "after it"], []),
    "long_window.jsonl.zst": (zst(records("window"), window_log=31), ["window"], []),
    "members.jsonl.gz": (gzip.compress(records("m1")) + gzip.compress(records("m2")), ["m1", "m2"], []),
    "nested.jsonl": (b'{"data": {"text": "deep"}}\n', [], [("no key 'text' (keys: data;", 27, False)]),
    "no_newline.jsonl": (records("with", "without")[:-1], ["with", "without"], []),
    "only_bom.txt": (BOM, [""], []),
    "packed.jsonl": (b"\x1f\x8b\x08\0\0\0\0\0\0\xff", [], [("not UTF-8: byte 0x8b at 1", 10, False)]),
    "plain.TXT": (b"plain", ["plain"], []),
    "plain.TXT.GZ": (gzip.compress(b"packed text"), ["packed text"], []),
    "pointer.jsonl.gz": (pointer("pointer.jsonl.gz"), [], [("a Git LFS pointer", 7000, True)]),
    "pointer.txt": (pointer("pointer.txt"), [], [("a Git LFS pointer", 5000, True)]),
    "pretty.json": (b'{\n "text": "p1"\n}\n{\n "text": "p2"\n}\n', ["p1", "p2"], []),
    "r.JSONL": (records("JSONL"), ["JSONL"], []),
    "r.Ndjson.Gz": (gzip.compress(records("Ndjson")), ["Ndjson"], []),
    "r.jl": (records("jl"), ["jl"], []),
    "r.jsonl": (records("jsonl"), ["jsonl"], []),
    "r.jsonl.gzip": (gzip.compress(records("gzip")), ["gzip"], []),
    "r.jsonl.zstd": (zst(records("zstd")), ["zstd"], []),
    "r.jsonlines": (records("jsonlines"), ["jsonlines"], []),
    "r.ndjson": (records("ndjson"), ["ndjson"], []),
    "skippable.jsonl.zst": (SKIPPABLE + zst(records("s1")) + SKIPPABLE + zst(records("s2")), ["s1", "s2"], []),
    "table.csv": whole(b"text\na table\n", "comma-separated values, which are not read; save them as JSON Lines"),
    "table.TSV.gz": whole(gzip.compress(b"text\na table\n"), "comma-separated values"),
    "unread.jsonl.bz2": whole(bz2.compress(records("bz2")), "compressed as .bz2, which is not read"),
    "utf16.jsonl": (
        '{"text": "a"}\n'.encode("utf-16-le"), [], [("no JSON", 27, False), ("no JSON", 1, False)],
    ),
    "two.json": (b'[{"a": 1}]', [], [("no key 'text'", 8, False)]),
    "utf16.txt": whole(
        "text".encode("utf-16"), "not UTF-8: byte 0xff at 0 (invalid start byte); perhaps iconv -f utf-16 -t utf-8 IN",
    ),
    "z_objects.txt": (records("told"), [records("told").decode()], []),
    "ß日本.txt": ("Straße".encode(), ["Straße"], []),
}  # fmt: skip
PASSED_OVER = {  # of texts, by the reason: names and contents
    "that are no text in UTF-8": {
        "archive.tar.gz": gzip.compress(b"x.txt" + bytes(512)),
        "no_mark.txt": "wide".encode("utf-16-le"),
        "paper.pdf": b"%PDF-1.7",
        "picture.png": b"\x89PNG\r\n\x1a\n\0\0",
    },
    "of one object without the key 'text'": {
        "package.json": b'{"name": "x"}',
        "tsconfig.json": b'{\n "y": {"text": 1}\n}',
    },
    "hidden": {".hidden.txt": b"hidden", ".git/config": b"[core]", "a/.DS_Store": b"\0\0\0\1Bud1"},
}
STREAM, FILE = pa.ipc.new_stream, pa.ipc.new_file
TABLES = {
    "columns.parquet": (parquet(["p1", "p2", ""], row_group_size=1), ["p1", "p2", ""], []),
    "cut.arrow": (c := arrow(STREAM, ["b1"], ["b2" * 99])[:-100], ["b1"], [("no table", len(c), True)]),
    "cut.parquet": whole(parquet(["gone"])[:-9], "no table that can be read"),
    "dictionary.parquet": (parquet(pa.array(["d", "d"]).dictionary_encode()), ["d", "d"], []),
    "empty.parquet": whole(b"", "no table that can be read"),
    "false.parquet": whole(b"<html>404</html>", "no table that can be read"),
    "file.arrow": (arrow(FILE, ["f1"], ["f2"]), ["f1", "f2"], []),
    "large.Parquet": (parquet(pa.array(["l"], pa.large_string())), ["l"], []),
    "no_rows.parquet": (parquet(pa.array([], pa.string())), [], []),
    "nulls.parquet": (parquet(["n", None]), ["n", ""], []),
    "only_nulls.parquet": (parquet(pa.nulls(200)), [""] * 200, []),
    "pointer.parquet": (pointer("pointer.parquet"), [], [("a Git LFS pointer", 268_435_456, True)]),
    "stream.arrow": (arrow(STREAM, ["s1"], ["s2"]), ["s1", "s2"], []),
    "z_records.jsonl": whole(records("beside"), "beside Parquet or Arrow; name it by --input, too"),
}


@pytest.fixture
def odd(tmp_path):
    """Write the files. Return the folders of texts and of tables."""
    texts, tables = tmp_path / "texts", tmp_path / "tables"
    for folder, files in ((texts, TEXTS), (tables, TABLES)):
        folder.mkdir()
        for name, (content, _, _) in files.items():
            (folder / name).write_bytes(content)
    for files in PASSED_OVER.values():
        for name, content in files.items():
            (texts / name).parent.mkdir(exist_ok=True)
            (texts / name).write_bytes(content)
    (tables / "README.md").write_bytes(b"beside")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "x.txt").write_text("through a folder")
    (texts / "z_folder").symlink_to(tmp_path / "outside")
    (texts / "z_link.txt").symlink_to(tmp_path / "outside" / "x.txt")
    (texts / "z_broken.txt").symlink_to(tmp_path / "nowhere")
    return texts, tables


def prepared(folders, output, **settings):
    request = Request(tokenizer=TokenizerChoice("bytes"), valid_fraction=0, **settings)
    corpus = input_corpus([str(folder) for folder in folders])
    return prepare_corpus(corpus, output, request)


def test_of_odd_files_every_text_is_in_and_every_loss_is_told(odd, tmp_path, caplog):
    result = prepared(odd, tmp_path / "out", num_workers=1, allow_lost=100)
    linked = {name: (b"", ["through a folder"], []) for name in ("z_folder/x.txt", "z_link.txt")}
    want, lost = [], []
    for folder, files in zip(odd, (TEXTS | linked, TABLES), strict=True):
        for name, (_, documents, losses) in sorted(files.items()):
            want += documents
            lost += [(str(folder / name), *loss) for loss in losses]
    train = TokenFile(tmp_path / "out" / "train").tokens[:]
    found = b"".join(bytes([token]) if token < 256 else b"\xff" for token in train.tolist()).split(b"\xff")
    assert found == [text.encode() for text in want if text] + [b""]
    assert result.manifest["parts"]["train"]["num_bytes"] == sum(len(text.encode()) for text in want)
    assert result.manifest["num_empty"] == want.count("")

    told = [json.loads(line) for line in (tmp_path / "out" / "bad_records.jsonl").read_text().splitlines()]
    assert [(line["path"], line["num_bytes"], line["whole_file"]) for line in told] == [
        (path, size, is_whole) for path, _, size, is_whole in lost
    ]
    assert [line["reason"] for line in told if not line["reason"].startswith(lost[told.index(line)][1])] == []
    files = {path for path, *_, is_whole in lost if is_whole}
    sizes = sum(size for path, _, size, is_whole in lost if is_whole or path not in files)
    assert result.manifest["lost"]["num_files"] == len(files)
    assert result.manifest["lost"]["num_bytes"] == sizes
    total = sum(file["num_bytes"] for file in result.manifest["request"]["files"])
    total += sum(size - len(pointer(name)) for name, size in LOST_POINTERS.items())
    assert result.manifest["lost"]["percent"] == 100 * sizes / total
    share = f"left out {100 * sizes / total:.2f} % of the bytes (bad_records.jsonl): "
    assert f"{share}3 files (268,447,456 bytes), the first: " in result.summary()
    told = "\n".join(record.getMessage() for record in caplog.records)
    for why, those in PASSED_OVER.items():
        assert f"passed over {len(those)} files ({sum(map(len, those.values()))} bytes) {why}: " in told
    texts, tables = odd
    fix = "; name one by --input to have it read"
    assert f"1 file (0 bytes) linked to nothing: {texts}/z_broken.txt{fix}" in told
    beside = f"{tables}/README.md, {tables}/z_records.jsonl"
    assert f"2 files (25 bytes) beside Parquet or Arrow: {beside}{fix}" in told
    (line,) = (record.getMessage() for record in caplog.records if "JSON object" in record.getMessage())
    assert line.endswith("name them .jsonl to have their records read: z_objects.txt")


def test_no_file_loses_more_than_its_bytes_and_what_is_allowed_is_kept(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(records("kept", None))
    (tmp_path / "b.jsonl.gz").write_bytes(packed := gzip.compress(b'{"x": "long"}\n' * 99))  # 14 times smaller
    lost = prepared([tmp_path], tmp_path / "out", allow_lost=100).manifest["lost"]
    assert lost["num_bytes"] == len(packed)


def test_what_a_plugin_reads_is_not_judged_by_its_compression(tmp_path, monkeypatch):
    (tmp_path / "a.jsonl.xz").write_bytes(b"its own")
    assert fault_of(str(tmp_path / "a.jsonl.xz"), "text")[0].startswith("compressed as .xz")
    monkeypatch.setitem(READERS.registered, ".jsonl.xz", lambda path: ["text"])
    assert fault_of(str(tmp_path / "a.jsonl.xz"), ".jsonl.xz") == ("", 0)


def test_too_much_that_headers_tell_is_refused_before_any_work(odd, tmp_path):
    told = r"more than --allow-lost 1, cannot be read: .*3 files \(268,447,456 bytes\), the first: .*`git lfs pull`"
    with pytest.raises(ValueError, match=told):
        prepared(odd, tmp_path / "out")
    assert not (tmp_path / "out.partial").exists()


def test_windows_of_zstandard_bound_the_workers_that_may_meet_them(tmp_path, monkeypatch):
    for number in range(4):
        window = {"window_log": 31} if number < 2 else {}
        (tmp_path / f"{number}.jsonl.zst").write_bytes(SKIPPABLE + zst(records("text"), **window))
    planned = make_plan(input_corpus([str(tmp_path)]), ProgressLine(), piece_bytes=1)
    for gibibytes, workers in ((1, 1), (5, 1), (9, 4)):  # half of it is for windows, of which two have 2 GiB
        monkeypatch.setattr("megamix.data.prepare.plan.memory_for_each", lambda _, size=gibibytes: (size * 2**30, ""))
        assert planned.num_workers(16) == workers

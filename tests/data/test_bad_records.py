"""Whoever prepares texts from the web: over thirty kinds of bad records are left out and listed by place and reason;
the records beside them are kept.
"""

import gzip
import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest

from megamix.data.prepare import records
from megamix.data.prepare.corpus import input_corpus
from megamix.data.prepare.pieces import PieceReport, documents_of
from megamix.data.prepare.plan import make_plan
from megamix.data.prepare.prepare_corpus import Request, prepare_corpus
from megamix.data.prepare.split import Split
from megamix.data.prepare.tokenizer_choice import TokenizerChoice

GOOD = b'{"text": "good"}\n'

# name: (the line, what the reason says). The line stands second of three.
BAD_LINES = {
    "no JSON": (b"hello", "no JSON: Expecting value"),
    "an object cut short": (b'{"text": "a', "no JSON: Invalid control character"),  # the line end
    "a comma too many": (b'{"text": "a",}', "no JSON: "),
    "two objects": (b'{"text": "a"} {"text": "b"}', "no JSON: Extra data"),
    "single quotes": (b"{'text': 'a'}", "no JSON: Expecting property name"),
    "a raw control character": (b'{"text": "a\x01b"}', "no JSON: Invalid control character"),
    "an unknown escape": (b'{"text": "\\x41"}', "no JSON: Invalid \\escape"),
    "a number of too many digits": (b'{"text": ' + b"9" * 5000 + b"}", "no JSON: Exceeds the limit"),
    "nested too deep": (b'{"text": ' + b"[" * 8000, "no JSON that can be read: nested too deep"),
    "an array": (b'["a"]', "no JSON object but a list"),
    "a string": (b'"a"', "no JSON object but a str"),
    "a bare null": (b"null", "no JSON object but a NoneType"),
    "no such key": (b'{"content": "a", "id": 1}', "no key 'text' (keys: content, id; --text-key names another)"),
    "no key at all": (b"{}", "no key 'text' (keys: none; --text-key names another)"),
    "a key in capitals": (b'{"Text": "a"}', "no key 'text' (keys: Text; --text-key names another)"),
    "null": (b'{"text": null}', "the value of 'text' is null, not a string"),
    "an integer": (b'{"text": 7}', "is a number, not a string"),
    "not a number": (b'{"text": NaN}', "is a number, not a string"),
    "a truth value": (b'{"text": true}', "is true or false, not a string"),
    "a list of strings": (b'{"text": ["a"]}', "is a list, not a string"),
    "an object in it": (b'{"text": {"en": "a"}}', "is an object, not a string"),
    "Latin-1": (b'{"text": "K\xe4se"}', "not UTF-8: byte 0xe4 at 11"),
    "UTF-16": ('{"text": "a"}'.encode("utf-16-le"), "no JSON: "),
    "UTF-8 cut short": (b'{"text": "a\xe6\x97"}', "not UTF-8: byte 0xe6"),
    "a surrogate in UTF-8": (b'{"text": "\xed\xa0\x80"}', "not UTF-8: byte 0xed"),
    "half a surrogate pair, escaped": (b'{"text": "a\\ud800b"}', "holds half a surrogate pair at character 1"),
    "a byte order mark in the middle": (b'\xef\xbb\xbf{"text": "a"}', "no JSON: "),
    "longer than a document may be": (b'{"text": "' + b"a" * 5000 + b'"}', "longer than 4096 bytes"),
    "longer than a line may be": (b'{"text": "a", "x": "' + b"b" * 20_000 + b'"}', "a record longer than 8192 bytes"),
}


@pytest.fixture
def short_limits(monkeypatch):
    monkeypatch.setattr("megamix.data.prepare.json_records._LONGEST_RECORD", 8192)
    monkeypatch.setattr("megamix.data.prepare.records.LONGEST_DOCUMENT", 4096)


def read(path, piece_bytes=2**20):
    """Return (documents, bad records, number of empty ones)."""
    texts = []
    bad = []
    num_empty = 0
    for piece in make_plan(input_corpus([str(path)]), piece_bytes).pieces:
        report = PieceReport()
        texts += [document.text for document in documents_of(piece, "text", Split(0, 0), report)]
        bad += report.bad_records
        num_empty += report.num_empty
    return texts, bad, num_empty


@pytest.mark.parametrize("kind", BAD_LINES)
def test_a_bad_line_is_left_out_with_its_number_and_reason(tmp_path, short_limits, kind):
    line, reason = BAD_LINES[kind]
    path = tmp_path / "x.jsonl"
    path.write_bytes(GOOD + line + b"\n" + GOOD)
    texts, (bad,), _ = read(path)
    assert texts == ["good", "good"]
    assert (bad["path"], bad["line"]) == (str(path), 2)
    assert reason in bad["reason"]


@pytest.mark.parametrize("kind", sorted(BAD_LINES.keys() - {"an object cut short", "nested too deep"}))
def test_a_bad_element_of_an_array_is_left_out_likewise(tmp_path, short_limits, kind):
    line, reason = BAD_LINES[kind]
    path = tmp_path / "x.json"
    path.write_bytes(b"[" + GOOD + b"," + line + b", " + GOOD + b"]")
    texts, (bad,), _ = read(path)
    assert texts == ["good", "good"]
    assert (bad["path"], bad["record"]) == (str(path), 2)
    assert reason in bad["reason"]


@pytest.mark.parametrize(
    ("content", "texts", "number"),
    [
        (b'[{"text": "a"}, {"text": "b"', ["a"], 2),
        (b'[{"text": "a"},', ["a"], 2),
        (b'[{"text": "a"}, {"text": "b}]', ["a"], 2),
        (b'[{"text": "a"}]}', ["a"], 2),
        (b'[{"text": "a"}] no JSON', ["a"], 2),
        (b'{\n"text": "a"}\n{\n"text": "b"\n', ["a"], 2),
        (b'[{"text": "a"}, {"x": ' + b"[" * 8000, ["a"], 2),
        (b'[{"text": "a"}, {"text": "' + b"b" * 20_000, ["a"], 2),
    ],
)
def test_of_an_array_that_does_not_end_what_came_before_is_kept(tmp_path, short_limits, content, texts, number):
    (tmp_path / "x.json").write_bytes(content)
    found, (bad,), _ = read(tmp_path / "x.json")
    assert (found, bad["record"]) == (texts, number)
    assert "the rest of the file cannot be read: " in bad["reason"]


@pytest.mark.parametrize(
    ("content", "texts"),
    [
        (b'[{"text": "a, [b] {c} \\"d\\" \\\\"}, {"text": "e", "x": [{"text": "f"}, 1]}]', ['a, [b] {c} "d" \\', "e"]),
        (b'\xef\xbb\xbf [\r\n{"text": "a"}\r\n,\n{"text": "b"}\n] \n', ["a", "b"]),
        (b'{\n "text": "a",\n "x": {"text": "b"}\n}\n', ["a"]),
        (b'\n{\r\n "text": "a"}{\n "text": "b"}\n', ["a", "b"]),
        (b'{"text": "a"}\n{"text": "b"}', ["a", "b"]),
        (b"[]", []),
        (b"", []),
    ],
)
def test_a_json_file_is_an_array_or_lines_or_objects(tmp_path, content, texts):
    (tmp_path / "x.json").write_bytes(content)
    assert read(tmp_path) == (texts, [], 0)


@pytest.mark.parametrize(
    ("content", "texts"),
    [
        (GOOD + b"\n  \t\n" + GOOD, ["good", "good"]),  # blank lines
        (b'\xef\xbb\xbf{"text": "first"}\r\n' + GOOD, ["first", "good"]),  # a byte order mark, CR LF
        (b'{"text": "a", "text": "b"}\n', ["b"]),  # the last of two
        (b'{"text": "no end"}', ["no end"]),
        (b'{"text": "\\ud83d\\ude42 \\u0000"}\n', ["\U0001f642 \0"]),
        (b"", []),
    ],
)
def test_odd_but_right_lines_are_read(tmp_path, content, texts):
    (tmp_path / "x.jsonl").write_bytes(content)
    assert read(tmp_path) == (texts, [], 0)


def test_an_empty_text_is_counted_and_not_listed(tmp_path):
    (tmp_path / "x.jsonl").write_bytes(GOOD + b'{"text": ""}\n')
    (tmp_path / "empty.txt").touch()
    assert read(tmp_path) == (["good"], [], 2)


def _compressed(ending, content):
    if ending == "gz":
        return gzip.compress(content, 1)
    import zstandard

    return zstandard.ZstdCompressor(write_checksum=True).compress(content)


# Nothing to compress: Zstandard gives a block of 128 KiB whole or not at all.
LINES = b"".join(b'{"text": "%s"}\n' % hashlib.sha512(b"%d" % number).hexdigest().encode() for number in range(9000))
DAMAGE = {
    "cut in the middle": lambda content: content[: len(content) // 2],
    "without its last byte": lambda content: content[:-1],
    "with a changed byte": lambda content: content[:-40] + bytes([content[-40] ^ 0xFF]) + content[-39:],
    "that is not compressed": lambda _: LINES,
    "with rubbish behind": lambda content: content + b"rubbish",
}


@pytest.mark.parametrize("ending", ["gz", "zst"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_of_a_damaged_compressed_file_what_came_before_is_kept(tmp_path, ending, damage):
    path = tmp_path / f"x.jsonl.{ending}"
    path.write_bytes(DAMAGE[damage](_compressed(ending, LINES)))
    texts, bad, _ = read(path)
    assert bad[-1]["line"] >= len(texts)
    assert "the rest of the file cannot be read: " in bad[-1]["reason"]
    whole = [json.loads(line)["text"] for line in LINES.splitlines()]
    assert texts == whole[: len(texts)] or damage == "with a changed byte"
    assert len(texts) > 1000 or damage == "that is not compressed"


@pytest.mark.parametrize("ending", ["gz", "zst"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_compressed_text_is_a_bad_record(tmp_path, ending, damage):
    path = tmp_path / f"x.txt.{ending}"
    path.write_bytes(DAMAGE[damage](_compressed(ending, LINES)))
    texts, (bad,), _ = read(path)
    assert (texts, bad["path"]) == ([], str(path))
    assert bad["reason"].startswith(("the file cannot be read: ", "not UTF-8"))


@pytest.mark.parametrize("ending", ["gz", "zst"])
def test_several_compressed_members_are_one_file(tmp_path, ending):
    path = tmp_path / f"x.jsonl.{ending}"
    path.write_bytes(_compressed(ending, GOOD) + _compressed(ending, b"") + _compressed(ending, GOOD))
    assert read(path) == (["good", "good"], [], 0)


@pytest.mark.parametrize(("content", "reason"), [(b"K\xe4se", "not UTF-8"), (b"a" * 5000, "longer than 4096 bytes")])
def test_a_bad_file_of_text_is_listed_by_its_path(tmp_path, short_limits, content, reason):
    (tmp_path / "bad.txt").write_bytes(content)
    (tmp_path / "good.txt").write_text("good")
    texts, (bad,), _ = read(tmp_path)
    assert texts == ["good"]
    assert (set(bad), bad["path"]) == ({"path", "reason"}, str(tmp_path / "bad.txt"))
    assert reason in bad["reason"]


def _write_table(path, rows, **options):
    """Write a column of strings, of any bytes."""
    import pyarrow

    column = pyarrow.array(rows, pyarrow.binary())
    strings = pyarrow.Array.from_buffers(pyarrow.string(), len(rows), column.buffers())
    table = pyarrow.table({"id": list(range(len(rows))), "text": strings})
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(table, path, **options)
    else:
        with pyarrow.ipc.new_stream(path, table.schema) as writer:
            writer.write_table(table, **options)


@pytest.mark.parametrize("ending", ["parquet", "arrow"])
def test_a_bad_row_of_a_table_costs_no_other(tmp_path, short_limits, ending):
    import pyarrow.parquet

    assert pyarrow.parquet
    path = tmp_path / f"x.{ending}"
    _write_table(path, [b"one", None, "zwölf".encode(), b"K\xe4se", b"", b"a" * 5000, b"seven"])
    texts, bad, num_empty = read(path)
    assert (texts, num_empty) == (["one", "zwölf", "seven"], 1)
    assert [line["row"] for line in bad] == [2, 4, 6]
    assert [line["reason"][:9] for line in bad] == ["null, not", "not UTF-8", "longer th"]


@pytest.mark.parametrize("ending", ["parquet", "arrow"])
@pytest.mark.parametrize("size", [0, 10, -1])
def test_a_damaged_table_is_a_bad_record(tmp_path, ending, size):
    import pyarrow.parquet

    assert pyarrow.parquet
    path = tmp_path / f"x.{ending}"
    _write_table(path, [b"one"] * 1000)
    content = path.read_bytes()
    path.write_bytes(content[:size] if size >= 0 else b"PAR1" + b"\xff" * (len(content) - 8) + content[-4:])
    texts, bad, _ = read(path)
    assert (texts, [line["path"] for line in bad]) == ([], [str(path)])


@pytest.mark.parametrize("ending", ["parquet", "arrow"])
def test_a_column_that_is_no_text_is_the_request_s_mistake(tmp_path, ending):
    import pyarrow.parquet

    assert pyarrow.parquet
    _write_table(tmp_path / f"x.{ending}", [b"one"])
    for text_key, message in (("content", r"has no column 'content' \(columns: id, text\)"), ("id", "holds int64")):
        request = Request(tokenizer=TokenizerChoice("bytes"), valid_fraction=0, text_key=text_key)
        with pytest.raises(ValueError, match=message + r".* by --text-key"):
            prepare_corpus(input_corpus([str(tmp_path)]), tmp_path / "out", request)


def test_more_bad_records_than_the_limit_stop_the_run_and_fewer_do_not(tmp_path):
    (tmp_path / "text").mkdir()
    for name in ("a", "b"):
        (tmp_path / "text" / f"{name}.jsonl").write_bytes(GOOD + b'{"body": 1}\n' + GOOD)
    request = Request(
        tokenizer=TokenizerChoice("bytes"), valid_fraction=0, num_workers=1, max_bad_records=2, piece_bytes=1
    )
    corpus = input_corpus([str(tmp_path / "text")])
    for limit in (0, 1):
        with pytest.raises(
            ValueError, match=rf"more than --max-bad-records {limit} bad .*a.jsonl line 2: no key 'text'.* higher limit"
        ):
            prepare_corpus(corpus, tmp_path / "out", replace(request, max_bad_records=limit))
        assert not (tmp_path / "out").exists()
        listed = (tmp_path / "out.partial" / "bad_records.jsonl").read_text().splitlines()
        assert [json.loads(line)["line"] for line in listed] == [2] * (limit + 1)
    prepared = prepare_corpus(corpus, tmp_path / "out", request)
    assert prepared.manifest["num_bad_records"] == 2
    listed = (tmp_path / "out" / "bad_records.jsonl").read_text().splitlines()
    assert [Path(json.loads(line)["path"]).name for line in listed] == ["a.jsonl", "b.jsonl"]


def test_there_are_thirty_kinds_and_the_limits_are_those_of_the_page():
    assert len(BAD_LINES) + len(DAMAGE) + 2 + 3 + 1 >= 30
    assert records.LONGEST_DOCUMENT == 2**26

"""The output of `megamix prepare` is whole or missing, has the same bytes each time, and holds each document in exactly
one part.
"""

import hashlib
import json
import os
from collections import Counter
from itertools import pairwise

import pytest

from megamix.base.progress import ProgressLine
from megamix.data.prepare import prepare_corpus as prepare_module
from megamix.data.prepare import tokenizer_choice
from megamix.data.prepare.corpus import input_corpus
from megamix.data.prepare.plan import make_plan
from megamix.data.prepare.prepare_corpus import Request, prepare_corpus
from megamix.data.prepare.split import Split, split_of
from megamix.data.prepare.tokenizer_choice import TokenizerChoice
from megamix.data.token_file import TokenFile
from megamix.data.tokenizer import Tokenizer

OUTPUTS = {"tokenizer.json", "tokenizer_config.json", "train.bin", "train.idx", "valid.bin", "valid.idx"}


@pytest.fixture
def text_dir(tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(40):
        (folder / f"{number:02}.txt").write_text(f"document {number}: " + "the same few words again and again " * 20)
    return folder


def prepare(paths, output, vocab_size=280, valid_fraction=0.25, **effort):
    """Prepare a path or several. `vocab_size` None: the tokenizer is that of bytes."""
    choice = TokenizerChoice("train" if vocab_size else "bytes", vocab_size)
    request = Request(tokenizer=choice, valid_fraction=valid_fraction, **{"num_workers": 1, **effort})
    paths = paths if isinstance(paths, list) else [paths]
    return prepare_corpus(input_corpus([*map(str, paths)]), output, request)


def plan_of(path, piece_bytes=2**24):
    return make_plan(input_corpus([str(path)]), ProgressLine(), piece_bytes=piece_bytes)


def _training_texts(plan, valid_fraction):
    return list(tokenizer_choice._training_texts(plan, Split(valid_fraction, longest=2**20), ProgressLine()))


def held_out(path, valid_fraction):
    return split_of(plan_of(path).files, valid_fraction).held_out


def documents(output, part):
    text = Tokenizer.load(output / "tokenizer.json").decode(TokenFile(output / part).tokens[:].tolist())
    return text.split("<|endoftext|>")[:-1]


def test_of_a_large_corpus_the_tokenizer_learns_from_a_bounded_part_spread_evenly(text_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(prepare_module, "TRAIN_BYTES", 2**13)
    monkeypatch.setattr(tokenizer_choice, "TRAIN_BYTES", 2**13)
    part = prepare(text_dir, tmp_path / "part", piece_bytes=2**11)
    assert "learned from 0.0078125 MiB spread over the corpus" in part.summary()
    plan = plan_of(text_dir, 2**11)
    texts = _training_texts(plan, 0.25)
    assert 2**12 < sum(len(text.encode()) for text in texts) <= 2**13 < plan.num_bytes
    found = [int(text[9:].partition(":")[0]) for text in texts]
    assert max(found) > 30
    assert max(now - before for before, now in pairwise(sorted(found))) < 10


def test_a_vocabulary_smaller_than_asked_is_told(text_dir, tmp_path):
    for _ in range(2):
        small = prepare(text_dir, tmp_path / "small", vocab_size=32000)
        size = small.manifest["vocab_size"]
        assert 280 < size < 500
        assert f"vocabulary {size} (asked for 32000: the text has no more to learn); train" in small.summary()


def test_every_document_lands_whole_in_exactly_one_part_and_the_manifest_says_so(text_dir, tmp_path):
    want = sorted(path.read_text() for path in text_dir.iterdir())
    (text_dir / "latin.txt").write_bytes(b"K\xe4se")
    output = tmp_path / "out"
    output.mkdir()  # an empty directory is as good as none
    prepared = prepare(text_dir, output)
    train, valid = documents(output, "train"), documents(output, "valid")
    assert sorted(train + valid) == want
    assert 4 <= len(valid) <= 16  # 40 draws at 0.25
    manifest = json.loads((output / "manifest.json").read_text())
    assert (prepared.manifest, prepared.reused) == (manifest, False)
    assert manifest["num_bad_records"] == 1
    (bad,) = (output / "bad_records.jsonl").read_text().splitlines()
    reason = "not UTF-8: byte 0xe4 at 1 (invalid continuation byte); "
    reason += "perhaps iconv -f latin1 -t utf-8 IN > OUT re-encodes it"
    path = str(text_dir / "latin.txt")
    assert json.loads(bad) == {"path": path, "reason": reason, "num_bytes": 4, "whole_file": True}
    assert len(manifest["request"]["files"]) == 41
    assert set(manifest["request"]["files"][0]) == {"path", "num_bytes", "sha256"}
    assert {path.name for path in output.iterdir()} == {"manifest.json", *manifest["outputs"]}
    assert manifest["outputs"].keys() == {*OUTPUTS, "bad_records.jsonl"}
    for name, listed in manifest["outputs"].items():
        content = (output / name).read_bytes()
        assert listed == {"num_bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    for part, texts in (("train", train), ("valid", valid)):
        counts = [len(texts), TokenFile(output / part).num_tokens, sum(map(len, texts))]
        assert [*manifest["parts"][part].values()] == counts
    assert "prepared; vocabulary 280; train " in prepared.summary()
    assert "left out 0.01 % of the bytes (bad_records.jsonl): 1 file (4 bytes), the first: " in prepared.summary()


def test_empty_files_and_records_are_counted_and_the_files_named(tmp_path):
    for name, text in {"a.txt": "words " * 50, "b.txt": "", "c.txt": ""}.items():
        (tmp_path / name).write_text(text)
    told = prepare(tmp_path, tmp_path / "out", None, 0.0).summary()
    assert told.endswith("; train 1 document, 301 tokens; 2 empty documents left out (empty files: b.txt, c.txt)")
    assert not list((tmp_path / "out").glob("valid*"))
    (tmp_path / "a.jsonl").write_text('{"text": "word"}\n{"text": ""}\n')
    told = prepare(tmp_path / "a.jsonl", tmp_path / "records", None, 0.0).summary()
    assert told.endswith("; train 1 document, 5 tokens; 1 empty document left out")
    told = prepare(tmp_path, tmp_path / "both", None, 0.0).summary()
    assert told.endswith("; 3 empty documents left out (empty files: b.txt, c.txt)")


def test_the_same_request_is_answered_from_what_is_there_and_any_other_is_refused(text_dir, tmp_path):
    output = tmp_path / "out"

    def refused(message, **changes):
        with pytest.raises(ValueError, match=message):
            prepare(text_dir, output, **changes)

    first = prepare(text_dir, output)
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in output.iterdir()}
    second = prepare(text_dir, output)
    assert (second.reused, second.manifest) == (True, first.manifest)
    assert "already prepared" in second.summary()
    otherwise = "was prepared otherwise: vocab_size 280, asked 290; choose another --output or delete"
    refused(otherwise, vocab_size=290)
    assert before == {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in output.iterdir()}
    (output / "train.bin").write_bytes(b"1234")
    refused(r"train.bin has 4 bytes, the manifest says \d+; choose")
    (output / "train.bin").unlink()
    refused(r"train.bin has None bytes")
    (text_dir / "00.txt").write_text((text_dir / "00.txt").read_text().replace("same", "SAME"))
    refused("other files or other contents")


@pytest.mark.parametrize("manifest", [None, "{", "{}"])
def test_a_directory_with_anything_else_in_it_is_refused(text_dir, tmp_path, manifest):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("mine")
    if manifest is not None:
        (tmp_path / "out" / "manifest.json").write_text(manifest)
    with pytest.raises(ValueError, match=r"--output '.*out' is not empty and holds no result of prepare.*; choose"):
        prepare(text_dir, tmp_path / "out")
    assert (tmp_path / "out" / "thesis.tex").read_text() == "mine"


def test_a_file_in_place_of_the_output_is_refused(text_dir, tmp_path):
    (tmp_path / "out").write_text("mine")
    with pytest.raises(ValueError, match="holds no result of prepare"):
        prepare(text_dir, tmp_path / "out")


def test_a_new_document_moves_no_more_than_one_of_its_folder(text_dir):
    for folder in ("a", "b", "c"):
        (text_dir / folder).mkdir()
        for number in range(40):
            (text_dir / folder / f"{number}.txt").write_text("word " * 50)
    before = held_out(text_dir, 0.25)
    (text_dir / "a" / "new.txt").write_text("word " * 50)
    after = held_out(text_dir, 0.25)
    assert len(before) == len(after) == 40
    assert len(before - after) <= 1
    assert all(name.startswith("a/") for name in before - after)


def test_every_folder_and_every_length_validates_by_its_share(tmp_path):
    """Draws without strata give some folders twice their share, and a small corpus's validation is of another kind."""
    for folder, count in (("code", 120), ("prose", 40)):
        (tmp_path / folder).mkdir()
        for number in range(count):
            (tmp_path / folder / f"{number:03}.txt").write_text("words " * (10 if number % 2 else 100))
    found = Counter((name.partition("/")[0], (tmp_path / name).stat().st_size) for name in held_out(tmp_path, 0.1))
    assert found == {("code", 60): 6, ("code", 600): 6, ("prose", 60): 2, ("prose", 600): 2}


def test_small_folders_have_their_share_together(tmp_path):
    for number in range(60):
        (tmp_path / f"{number:02}").mkdir()
        (tmp_path / f"{number:02}" / "only.txt").write_text("words")
    assert len(held_out(tmp_path, 0.05)) == 3


def test_a_document_longer_than_half_of_validation_stays_in_training(text_dir):
    long = [path for path in text_dir.iterdir() if path.name < "04"]
    text = long[0].read_text()
    for times, validating in ((4, 1), (12, 0)):  # a quarter of 40 documents validates
        for path in long:
            path.write_text(text * times)
        found = held_out(text_dir, 0.25)
        assert len(found) == 9 + validating
        assert len(found & {path.name for path in long}) == validating


def test_where_none_validates_the_one_with_the_lowest_draw_moves_there_with_its_equals_from_any_piece(tmp_path):
    texts = [f"record {number % 5} of some words" for number in range(10)]
    path = tmp_path / "r.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    for piece_bytes in (1, 100, 2**30):
        output = tmp_path / f"{piece_bytes}"
        counts = prepare(path, output, valid_fraction=1e-6, piece_bytes=piece_bytes).manifest["parts"]
        train, (moved, *others) = documents(output, "train"), documents(output, "valid")
        assert others == [moved] == [min(texts, key=lambda text: hashlib.sha256(text.encode()).digest())]
        assert train == [text for text in texts if text != moved]
        assert (counts["valid"]["num_documents"], counts["valid"]["num_bytes"]) == (2, 44)
        assert counts["train"]["num_bytes"] == 8 * 22
    assert sorted(_training_texts(plan_of(path), 1e-6)) == sorted(train)


def test_a_second_job_in_one_process_encodes_by_its_own_tokenizer(tmp_path):
    text, output = tmp_path / "text", tmp_path / "out"  # the second tokenizer lies where the first one lay
    text.mkdir()
    for number, words in enumerate(("the cat sat on the mat ", "zyx wvu tsr qpo nml kji ")):
        (text / "page.txt").write_text(words * 40)
        prepare(text, output, valid_fraction=0)
        (want,) = Tokenizer.load(output / "tokenizer.json").encode_documents([words * 40])
        assert TokenFile(output / "train").tokens[:].tolist() == want.tolist()
        output.rename(tmp_path / f"{number}")


def test_files_of_one_name_validate_by_their_text(tmp_path):
    paths = [tmp_path / f"{number}" / "page.txt" for number in range(40)]
    for path in paths:
        path.parent.mkdir()
        path.write_text(f"page {path.parent.name} of words")
    manifest = prepare(paths, tmp_path / "out", None).manifest
    assert 4 <= manifest["parts"]["valid"]["num_documents"] <= 16  # 40 draws at 0.25


def test_the_tokenizer_has_not_seen_the_validation_documents(text_dir, tmp_path):
    prepare(text_dir, tmp_path / "a")
    valid = documents(tmp_path / "a", "valid")
    for path in text_dir.iterdir():
        if path.read_text() in valid:
            path.write_text("quartz " * 99)
    prepare(text_dir, tmp_path / "b")
    assert (tmp_path / "a/tokenizer.json").read_bytes() == (tmp_path / "b/tokenizer.json").read_bytes()


def test_wrong_input_is_refused_before_anything_is_written(text_dir, tmp_path):
    for vocab_size, valid_fraction, message in (
        (256, 0.1, "--vocab-size 256 is too small.* give at least 257"),
        (300, 1.0, "--valid-fraction 1.0 must lie in 0 <= F < 1; "),
        (300, -0.1, "--valid-fraction -0.1 must lie in 0 <= F < 1; "),
    ):
        with pytest.raises(ValueError, match=message):
            prepare(text_dir, tmp_path / "sub" / "out", vocab_size, valid_fraction)
    with pytest.raises(ValueError, match="--allow-lost 101 must lie in 0 <= PERCENT <= 100; "):
        prepare(text_dir, tmp_path / "sub" / "out", allow_lost=101)
    assert not (tmp_path / "sub").exists()


def test_a_single_document_cannot_be_split(tmp_path):
    (tmp_path / "only.txt").write_text("one")
    told = r"--valid-fraction 0.1 leaves none of 1 document.* to train on; .* split it into a new folder"
    with pytest.raises(ValueError, match=told):
        prepare(tmp_path, tmp_path / "sub" / "out", valid_fraction=0.1)
    assert not (tmp_path / "sub" / "out").exists()


def test_a_corpus_without_text_leaves_no_output_and_says_what_it_holds(tmp_path):
    text, output = tmp_path / "text", tmp_path / "sub" / "out"
    text.mkdir()

    def refused(told, **effort):
        with pytest.raises(ValueError, match=told):
            prepare(text, output, **effort)

    (text / "empty.txt").touch()
    refused("holds no text, only 1 file without a byte or a row; give other files")
    assert not output.parent.exists()
    (text / "x.jsonl").write_text('{"text": ""}\n' * 3)
    (text / "bom.txt").write_bytes(b"\xef\xbb\xbf")
    refused("holds no text, only 5 empty documents; name the key")
    (text / "latin.txt").write_bytes(b"K\xe4se")
    iconv = r".*latin.txt: not UTF-8: byte 0xe4 at 1 .*; perhaps iconv -f latin1 -t utf-8 IN > OUT re-encodes it"
    refused(r"8.70 % of the bytes, more than --allow-lost 1, cannot be read: 1 file \(4 bytes\), the first: " + iconv)
    refused(r"holds no text, only 5 empty documents; 1 file \(4 bytes\), the first: .*latin", allow_lost=100)
    assert list(output.parent.iterdir()) == []


def test_an_output_that_fills_up_meanwhile_is_not_overwritten(text_dir, tmp_path, monkeypatch):
    rename = os.rename

    def late_rename(source, target):
        if target.name == "out":
            target.mkdir()
            (target / "manifest.json").write_text("of another process")
        rename(source, target)

    monkeypatch.setattr("os.rename", late_rename)
    with pytest.raises(OSError, match="not empty"):
        prepare(text_dir, tmp_path / "out")
    (manifest,) = (tmp_path / "out").iterdir()
    assert manifest.read_text() == "of another process"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "out.partial", "text"]

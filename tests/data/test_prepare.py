"""The output of `megamix prepare` is whole or missing, has the same bytes each time, and holds each document in exactly
one part.
"""

import hashlib
import json
import os
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from megamix.data.prepare import prepare_corpus as prepare_module
from megamix.data.prepare import tokenizer_choice
from megamix.data.prepare.corpus import input_corpus, named_corpus
from megamix.data.prepare.plan import make_plan
from megamix.data.prepare.prepare_corpus import Request, prepare_corpus
from megamix.data.prepare.split import Split, split_of
from megamix.data.prepare.tokenizer_choice import TokenizerChoice
from megamix.data.token_file import TokenFile
from megamix.data.tokenizer import Tokenizer
from megamix.progress import ProgressLine

OUTPUTS = [
    "manifest.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "train.bin",
    "train.idx",
    "valid.bin",
    "valid.idx",
]


@pytest.fixture
def text_dir(tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(40):
        (folder / f"{number:02}.txt").write_text(f"document {number}: " + "the same few words again and again " * 20)
    return folder


def prepare(text_dir, output, vocab_size=280, valid_fraction=0.25, **effort):
    choice, effort = TokenizerChoice("train", vocab_size), {"num_workers": 1, **effort}
    request = Request(tokenizer=choice, valid_fraction=valid_fraction, **effort)
    return prepare_corpus(input_corpus([str(text_dir)]), output, request)


def _training_texts(plan, valid_fraction):
    return list(tokenizer_choice._training_texts(plan, "text", Split(valid_fraction, longest=2**20), ProgressLine()))


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def documents(prefix, tokenizer):
    text = tokenizer.decode(TokenFile(prefix).tokens[:].tolist())
    return text.split("<|endoftext|>")[:-1]


def test_every_document_lands_whole_in_exactly_one_part(text_dir, tmp_path):
    output = tmp_path / "out"
    prepared = prepare(text_dir, output)
    assert not prepared.reused
    assert sorted(contents(output)) == OUTPUTS
    tokenizer = Tokenizer.load(output / "tokenizer.json")
    train, valid = documents(output / "train", tokenizer), documents(output / "valid", tokenizer)
    assert sorted(train + valid) == sorted(path.read_text() for path in text_dir.iterdir())
    assert 4 <= len(valid) <= 16  # 40 draws at 0.25


def test_of_a_large_corpus_the_tokenizer_learns_from_a_bounded_part_spread_evenly(text_dir, tmp_path, monkeypatch):
    whole = prepare(text_dir, tmp_path / "whole", piece_bytes=2**11)
    assert "learned from" not in whole.summary()
    monkeypatch.setattr(prepare_module, "TRAIN_BYTES", 2**13)
    monkeypatch.setattr(tokenizer_choice, "TRAIN_BYTES", 2**13)
    part = prepare(text_dir, tmp_path / "part", piece_bytes=2**11)
    assert "learned from 0.0078125 MiB spread over the corpus" in part.summary()
    plan = make_plan(input_corpus([str(text_dir)]), 2**11)
    texts = _training_texts(plan, 0.25)
    assert 2**12 < sum(len(text.encode()) for text in texts) <= 2**13 < plan.num_bytes
    found = [int(text[9:].partition(":")[0]) for text in texts]
    assert max(found) > 30
    assert max(now - before for before, now in pairwise(sorted(found))) < 10


def test_a_vocabulary_smaller_than_asked_is_told(text_dir, tmp_path):
    small = prepare(text_dir, tmp_path / "small", vocab_size=32000)
    size = small.manifest["vocab_size"]
    assert 280 < size < 500
    told = f"vocabulary {size} (asked for 32000: the text has no more to learn); train"
    assert told in small.summary()
    assert told in prepare(text_dir, tmp_path / "small", vocab_size=32000).summary()
    assert "asked for" not in prepare(text_dir, tmp_path / "whole").summary()


def test_the_manifest_says_what_was_read_and_written(text_dir, tmp_path):
    (text_dir / "latin.txt").write_bytes(b"K\xe4se")
    prepared = prepare(text_dir, tmp_path / "out")
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest == prepared.manifest
    assert manifest["num_bad_records"] == 1
    (bad,) = (tmp_path / "out" / "bad_records.jsonl").read_text().splitlines()
    assert json.loads(bad) == {
        "path": str(text_dir / "latin.txt"), "reason": "not UTF-8: byte 0xe4 at 1 (invalid continuation byte)"
    }  # fmt: skip
    assert len(manifest["request"]["files"]) == 41
    for name, listed in manifest["outputs"].items():
        content = (tmp_path / "out" / name).read_bytes()
        assert listed == {"num_bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    assert set(manifest["outputs"]) == {*OUTPUTS, "bad_records.jsonl"} - {"manifest.json"}
    assert set(manifest["request"]["files"][0]) == {"path", "num_bytes", "sha256"}
    train = TokenFile(tmp_path / "out" / "train")
    text = sum(len(path.read_bytes()) for path in text_dir.iterdir() if path.name != "latin.txt")
    assert sum(part.pop("num_bytes") for part in manifest["parts"].values()) == text
    assert manifest["parts"]["train"] == {"num_documents": train.num_documents, "num_tokens": train.num_tokens}
    assert manifest["vocab_size"] == Tokenizer.load(tmp_path / "out" / "tokenizer.json").vocab_size
    assert "prepared; vocabulary 280; train " in prepared.summary()
    assert "1 bad record left out (bad_records.jsonl), the first: " in prepared.summary()


def test_empty_files_and_records_are_counted_and_the_files_named(tmp_path):
    for name, text in {"a.txt": "words " * 50, "b.txt": "", "c.txt": ""}.items():
        (tmp_path / name).write_text(text)
    corpus = input_corpus([str(tmp_path)])
    request = Request(tokenizer=TokenizerChoice("bytes"), valid_fraction=0.0)
    told = prepare_corpus(corpus, tmp_path / "out", request).summary()
    assert told.endswith("; train 1 document, 301 tokens; 2 empty documents left out: b.txt, c.txt")
    (tmp_path / "a.jsonl").write_text('{"text": "word"}\n{"text": ""}\n')
    told = prepare_corpus(input_corpus([str(tmp_path / "a.jsonl")]), tmp_path / "records", request).summary()
    assert told.endswith("; train 1 document, 5 tokens; 1 empty document left out")


def test_the_same_request_is_answered_from_what_is_there(text_dir, tmp_path):
    first = prepare(text_dir, tmp_path / "out")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    second = prepare(text_dir, tmp_path / "out")
    assert second.reused
    assert second.manifest == first.manifest
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    assert "already prepared" in second.summary()


def test_two_prepares_of_one_request_write_the_same_bytes(text_dir, tmp_path):
    (tmp_path / "b").mkdir()  # an empty directory is as good as none
    prepare(text_dir, tmp_path / "a")
    prepare(text_dir, tmp_path / "b")
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


@pytest.mark.parametrize(
    ("vocab_size", "valid_fraction", "message"),
    [
        (290, 0.25, r"was prepared otherwise: vocab_size 280, asked 290; choose another --output or delete"),
        (280, 0.5, r"was prepared otherwise: valid_fraction 0.25, asked 0.5; choose"),
    ],
)
def test_the_result_of_another_request_is_refused_not_overwritten(
    text_dir, tmp_path, vocab_size, valid_fraction, message
):
    prepare(text_dir, tmp_path / "out")
    before = contents(tmp_path / "out")
    with pytest.raises(ValueError, match=message):
        prepare(text_dir, tmp_path / "out", vocab_size, valid_fraction)
    assert contents(tmp_path / "out") == before


def test_a_changed_corpus_is_another_request(text_dir, tmp_path):
    prepare(text_dir, tmp_path / "out")
    (text_dir / "00.txt").write_text((text_dir / "00.txt").read_text().replace("same", "SAME"))
    with pytest.raises(ValueError, match="other files or other contents"):
        prepare(text_dir, tmp_path / "out")


def test_a_damaged_result_is_refused(text_dir, tmp_path):
    prepare(text_dir, tmp_path / "out")
    (tmp_path / "out" / "train.bin").write_bytes(b"1234")
    with pytest.raises(ValueError, match=r"train.bin has 4 bytes, the manifest says \d+; choose"):
        prepare(text_dir, tmp_path / "out")
    (tmp_path / "out" / "train.bin").unlink()
    with pytest.raises(ValueError, match=r"train.bin has None bytes"):
        prepare(text_dir, tmp_path / "out")


@pytest.mark.parametrize("manifest", [None, "{", "[]", "{}", '{"request": [], "outputs": {}}'])
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


def test_a_new_document_moves_no_more_than_one_of_its_folder(text_dir, tmp_path):
    for folder in ("a", "b", "c"):
        (text_dir / folder).mkdir()
        for number in range(40):
            (text_dir / folder / f"{number}.txt").write_text("word " * 50)
    before = split_of(make_plan(input_corpus([str(text_dir)])).files, 0.25).held_out
    (text_dir / "a" / "new.txt").write_text("word " * 50)
    after = split_of(make_plan(input_corpus([str(text_dir)])).files, 0.25).held_out
    assert len(before) == len(after) == 40
    assert len(before - after) <= 1
    assert before - after <= {name for name in before if name.startswith("a/")}


def test_every_folder_and_every_length_validates_by_its_share(tmp_path):
    """Draws without strata give some folders twice their share, and a small corpus's validation is of another kind."""
    for folder, count in (("code", 120), ("prose", 40), ("tables", 40)):
        (tmp_path / folder).mkdir()
        for number in range(count):
            (tmp_path / folder / f"{number:03}.txt").write_text("words " * (10 if number % 2 else 100))
    files = make_plan(input_corpus([str(tmp_path)])).files
    sizes = {planned.file.name: planned.num_bytes for planned in files}
    held_out = split_of(files, 0.1).held_out
    found = Counter((name.partition("/")[0], sizes[name]) for name in held_out)
    assert found == {
        ("code", 60): 6, ("code", 600): 6, ("prose", 60): 2, ("prose", 600): 2, ("tables", 60): 2, ("tables", 600): 2,
    }  # fmt: skip


def test_small_folders_have_their_share_together(tmp_path):
    for number in range(60):
        (tmp_path / f"{number:02}").mkdir()
        (tmp_path / f"{number:02}" / "only.txt").write_text("words")
    assert len(split_of(make_plan(input_corpus([str(tmp_path)])).files, 0.05).held_out) == 3


def test_the_standard_library_s_character_tables_are_no_more_of_validation_than_of_the_text():
    files = make_plan(named_corpus("stdlib")).files
    split = split_of(files, 0.05)
    held_out = [planned for planned in files if planned.file.name in split.held_out]
    eligible = [planned for planned in files if planned.num_bytes <= split.longest]

    def share_of_tables(part):
        tables = sum(planned.num_bytes for planned in part if planned.file.name.startswith("encodings/"))
        return tables / sum(planned.num_bytes for planned in part)

    assert share_of_tables(held_out) == pytest.approx(share_of_tables(eligible), abs=0.05)


def test_a_document_longer_than_half_of_validation_stays_in_training(text_dir):
    long = [path for path in text_dir.iterdir() if path.name < "04"]
    text = long[0].read_text()
    for times, validating in ((4, 1), (12, 0)):  # a quarter of 40 documents validates
        for path in long:
            path.write_text(text * times)
        held_out = split_of(make_plan(input_corpus([str(text_dir)])).files, 0.25).held_out
        assert len(held_out) == 9 + validating
        assert len(held_out & {path.name for path in long}) == validating


def test_where_no_document_validates_the_one_with_the_lowest_draw_moves_there_from_any_piece(text_dir, tmp_path):
    def draw(path):
        return hashlib.sha256(path.name.encode()).digest()

    lowest = min(text_dir.iterdir(), key=draw).read_text()
    for piece_bytes in (1, 2**11, 2**30):
        output = tmp_path / f"{piece_bytes}"
        prepare(text_dir, output, valid_fraction=1e-6, piece_bytes=piece_bytes)
        tokenizer = Tokenizer.load(output / "tokenizer.json")
        assert documents(output / "valid", tokenizer) == [lowest]
        rest = [path.read_text() for path in sorted(text_dir.iterdir()) if path.read_text() != lowest]
        assert documents(output / "train", tokenizer) == rest
    plan = make_plan(input_corpus([str(text_dir)]))
    assert sorted(_training_texts(plan, 1e-6)) == sorted(rest)


def test_equal_records_move_to_validation_together(tmp_path):
    texts = [f"record {number % 5} of some words" for number in range(10)]
    path = tmp_path / "r.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    for piece_bytes in (1, 100, 2**30):
        output = tmp_path / f"{piece_bytes}"
        counts = prepare(path, output, valid_fraction=1e-6, piece_bytes=piece_bytes).manifest["parts"]
        tokenizer = Tokenizer.load(output / "tokenizer.json")
        train, (moved, *others) = documents(output / "train", tokenizer), documents(output / "valid", tokenizer)
        assert others == [moved]
        assert train == [text for text in texts if text != moved]
        assert counts["valid"] == {"num_documents": 2, "num_tokens": counts["valid"]["num_tokens"], "num_bytes": 44}
        assert counts["train"]["num_bytes"] == 8 * 22
    plan = make_plan(input_corpus([str(path)]))
    assert sorted(_training_texts(plan, 1e-6)) == sorted(train)


def test_a_second_job_in_one_process_encodes_by_its_own_tokenizer(tmp_path):
    for name, words in (("a", "the cat sat on the mat "), ("b", "zyx wvu tsr qpo nml kji ")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "page.txt").write_text(words * 40)
    for name in ("a", "b"):  # one folder, so that the second tokenizer lies where the first one lay
        prepare(tmp_path / name, tmp_path / "out", valid_fraction=0)
        (tmp_path / "out").rename(tmp_path / f"{name}.out")
    tokenizer = Tokenizer.load(tmp_path / "b.out" / "tokenizer.json")
    (want,) = tokenizer.encode_documents(["zyx wvu tsr qpo nml kji " * 40])
    assert TokenFile(tmp_path / "b.out" / "train").tokens[:].tolist() == want.tolist()


def test_files_of_one_name_validate_by_their_text(tmp_path):
    for number in range(40):
        (tmp_path / f"{number}").mkdir()
        (tmp_path / f"{number}" / "page.txt").write_text(f"page {number} of words")
    corpus = input_corpus([str(tmp_path / f"{number}" / "page.txt") for number in range(40)])
    request = Request(tokenizer=TokenizerChoice("bytes"), valid_fraction=0.25, num_workers=1)
    prepared = prepare_corpus(corpus, tmp_path / "out", request)
    assert 4 <= prepared.manifest["parts"]["valid"]["num_documents"] <= 16  # 40 draws at 0.25


def test_no_validation_files_when_none_are_asked_for(text_dir, tmp_path):
    prepare(text_dir, tmp_path / "out", valid_fraction=0)
    assert sorted(contents(tmp_path / "out")) == [name for name in OUTPUTS if not name.startswith("valid")]
    assert TokenFile(tmp_path / "out" / "train").num_documents == 40


def test_the_tokenizer_has_not_seen_the_validation_documents(text_dir, tmp_path):
    prepare(text_dir, tmp_path / "a")
    valid = documents(tmp_path / "a" / "valid", Tokenizer.load(tmp_path / "a" / "tokenizer.json"))
    for path in text_dir.iterdir():
        if path.read_text() in valid:
            path.write_text("quartz " * 99)
    prepare(text_dir, tmp_path / "b")
    assert contents(tmp_path / "a")["tokenizer.json"] == contents(tmp_path / "b")["tokenizer.json"]


@pytest.mark.parametrize(
    ("vocab_size", "valid_fraction", "message"),
    [
        (100, 0.1, "--vocab-size 100 is too small"),
        (300, 1.0, "--valid-fraction 1.0 must lie in 0 <= F < 1; "),
        (300, -0.1, "--valid-fraction -0.1 must lie in 0 <= F < 1; "),
        (300, float("nan"), "--valid-fraction nan must lie in 0 <= F < 1; "),
    ],
)
def test_wrong_input_is_refused_before_anything_is_written(text_dir, tmp_path, vocab_size, valid_fraction, message):
    with pytest.raises(ValueError, match=message):
        prepare(text_dir, tmp_path / "sub" / "out", vocab_size, valid_fraction)
    assert not (tmp_path / "sub").exists()


def test_a_single_document_cannot_be_split(tmp_path):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "only.txt").write_text("one")
    with pytest.raises(
        ValueError, match=r"--valid-fraction 0.1 leaves none of 1 document.* to train on; .* split it into a new folder"
    ):
        prepare(tmp_path / "text", tmp_path / "sub" / "out", valid_fraction=0.1)
    assert not (tmp_path / "sub" / "out").exists()


def test_an_empty_corpus_leaves_no_output(tmp_path):
    (tmp_path / "text").mkdir()
    with pytest.raises(ValueError, match="holds no file that can be read"):
        prepare(tmp_path / "text", tmp_path / "sub" / "out")
    (tmp_path / "text" / "empty.txt").touch()
    with pytest.raises(ValueError, match="holds no text; give files"):
        prepare(tmp_path / "text", tmp_path / "sub" / "out")
    assert not (tmp_path / "sub").exists()
    (tmp_path / "text" / "latin.txt").write_bytes(b"K\xe4se")
    told = r"holds no text, only 1 bad records, the first: .*latin.txt: not UTF-8.*; re-encode such files as UTF-8, "
    with pytest.raises(ValueError, match=told + "for example by iconv -f latin1 -t utf-8"):
        prepare(tmp_path / "text", tmp_path / "sub" / "out")
    assert list((tmp_path / "sub").iterdir()) == []


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
    assert contents(tmp_path / "out") == {"manifest.json": b"of another process"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "out.partial", "text"]


def test_token_ids_stay_below_the_vocabulary(text_dir, tmp_path):
    prepared = prepare(text_dir, tmp_path / "out")
    assert int(np.max(TokenFile(tmp_path / "out" / "train").tokens)) < prepared.manifest["vocab_size"]

"""A corpus's files are read in a fixed order, each once; a missing file is refused with flag, value and fix."""

import gzip
import json
import sys

import pytest

from megamix.data.prepare.corpus import folder_files, input_corpus, named_corpus


def write_files(root, *names):
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("text")


def names(*paths):
    return [file.name for file in input_corpus([str(path) for path in paths]).files]


def test_files_of_a_folder_are_listed_in_sorted_order(tmp_path):
    write_files(tmp_path, "b.txt", "a/z.md", "a.txt")
    assert names(tmp_path) == ["a.txt", "a/z.md", "b.txt"]


def test_inputs_come_in_the_order_they_are_given(tmp_path):
    write_files(tmp_path, "b.txt", "a/z.md", "a/c.txt")
    assert names(tmp_path / "b.txt", tmp_path / "a") == ["b.txt", "c.txt", "z.md"]


def test_the_ending_says_which_files_hold_records(tmp_path):
    endings = ["jsonl", "jsonl.gz", "jsonl.zst", "json.gz", "json.zst", "parquet", "arrow", "txt", "json", "gz"]
    write_files(tmp_path, *(f"x.{ending}" for ending in endings))
    kinds = {file.name: file.kind for file in folder_files(tmp_path)}
    want = ["jsonl"] * 3 + ["json"] * 2 + ["parquet", "arrow", "text", "json", "text"]
    assert kinds == {f"x.{ending}": kind for ending, kind in zip(endings, want, strict=True)}
    for name in ("x.json", "x.json.gz", "x.json.zst"):  # looked into; they are empty
        assert [file.kind for file in input_corpus([str(tmp_path / name)]).files] == ["jsonl"]


def test_what_lies_beside_tables_is_passed_over_with_a_line(tmp_path, caplog, monkeypatch):
    others = ("README.md", "infos.json.zst", "a.csv", "x.jsonl", *(f"{n}.py" for n in range(7)))
    write_files(tmp_path, "data/x.parquet", *others)
    monkeypatch.setitem(sys.modules, "zstandard", None)  # files passed over do not need it
    size = sum((tmp_path / name).stat().st_size for name in others)
    assert names(tmp_path) == ["data/x.parquet"]
    assert [record.getMessage() for record in caplog.records] == [
        f"--input '{tmp_path}': files beside Parquet or Arrow are passed over: "
        "a.csv, 0.py, 1.py, 2.py, 3.py, 4.py, 5.py, 6.py and 3 more"
    ]
    assert names(tmp_path, tmp_path / "README.md")[-1] == "README.md"
    alone, named = (input_corpus([str(tmp_path), *more]) for more in ([], [str(tmp_path / "README.md")]))
    assert alone.passed_over.startswith(f"; 11 files ({size} bytes) passed over: name one by --input")
    assert named.passed_over.startswith("; 10 files (")
    assert alone.outside(tmp_path / "a").passed_over == alone.passed_over
    write_files(tmp_path, "pair/x.parquet", "pair/a.py")
    assert input_corpus([str(tmp_path / "pair")]).passed_over.startswith("; 1 file (")


@pytest.mark.parametrize("content", [b"\x89PNG\r\n\x1a\n\0\0", gzip.compress(b"text", mtime=0), b"\x7fELF\2\1\1\0"])
def test_what_is_no_text_is_refused_by_name_or_passed_over_with_a_line(tmp_path, caplog, content):
    (tmp_path / "x").mkdir()
    (tmp_path / "x/y.bin").write_bytes(content)
    for path in (tmp_path / "x", tmp_path / "x/y.bin"):
        with pytest.raises(
            ValueError, match=rf"--input '{path}' holds no text in UTF-8, but y.bin; give text, .jsonl, "
        ):
            names(path)
    write_files(tmp_path, "x/a.txt")
    assert names(tmp_path / "x") == ["a.txt"]
    assert caplog.records[-1].getMessage().endswith("x': files that are no text in UTF-8 are passed over: y.bin")


def test_comma_separated_values_are_refused_by_name(tmp_path):
    write_files(tmp_path, "a.txt", "b/c.csv")
    for path in (tmp_path, tmp_path / "b/c.csv"):
        with pytest.raises(
            ValueError, match=r"b/c.csv holds comma-separated values, .* save them as JSON Lines .*--text-key"
        ):
            names(path)


def test_hidden_and_left_out_places_are_not_read(tmp_path):
    write_files(
        tmp_path, "json/a.py", "json/tests/b.py", "test/c.py", "site-packages/d/e.py", ".git/f.py", ".g.py", "h"
    )
    found = folder_files(tmp_path, suffix=".py", left_out=frozenset({"test", "tests", "site-packages"}))
    assert [file.name for file in found] == ["json/a.py"]
    assert names(tmp_path) == ["h", "json/a.py", "json/tests/b.py", "site-packages/d/e.py", "test/c.py"]


def test_a_broken_link_is_no_file(tmp_path):
    write_files(tmp_path, "a.txt")
    (tmp_path / "b.txt").symlink_to(tmp_path / "gone")
    assert names(tmp_path) == ["a.txt"]


def test_linked_folders_are_read_once_whatever_loops_there_are(tmp_path):
    write_files(tmp_path, "in/a/x.txt", "out/y.txt", "out/z/w.txt")
    for link, target in (("in/loop", "in"), ("in/twice", "in/a"), ("in/b", "out/z"), ("in/c", "out")):
        (tmp_path / link).symlink_to(tmp_path / target)
    (tmp_path / "out/back").symlink_to(tmp_path / "out")
    assert names(tmp_path / "in") == ["a/x.txt", "b/w.txt", "c/y.txt"]


def test_a_file_given_twice_is_refused(tmp_path):
    write_files(tmp_path, "a/x.txt", "b.txt")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    for other in ("a", "a/x.txt", "link", "."):
        with pytest.raises(ValueError, match=r"--input '.*a' and '.*' both hold .*x.txt; give each file once"):
            names(tmp_path / "a", tmp_path / "b.txt", tmp_path / other)


def test_one_path_in_two_spellings_is_one_request(tmp_path, monkeypatch):
    write_files(tmp_path, "a/x.txt")
    monkeypatch.chdir(tmp_path)
    assert input_corpus(["a"]) == input_corpus(["./a"]) == input_corpus(["a/"])


def test_the_standard_library_is_a_corpus_without_tests():
    paths = [file.name for file in named_corpus("stdlib").files]
    assert paths == sorted(paths)
    assert "json/decoder.py" in paths
    assert not [path for path in paths if {"test", "tests", "idlelib", "site-packages"} & set(path.split("/"))]


def test_torch_is_found_without_importing_it(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert "nn/modules/linear.py" in [file.name for file in named_corpus("torch").files]
    assert "torch" not in sys.modules


def test_of_a_saved_dataset_the_split_s_own_files_are_read(tmp_path):
    for split in ("train", "test"):
        write_files(
            tmp_path, f"{split}/data-00000-of-00001.arrow", f"{split}/dataset_info.json", f"{split}/stale.arrow"
        )
        state = {"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}
        (tmp_path / split / "state.json").write_text(json.dumps(state))
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    for split, folder in (("train", tmp_path), ("test", tmp_path), ("train", tmp_path / "test")):
        (file,) = input_corpus([str(folder)], split).files
        where = folder / split if folder == tmp_path else folder
        assert (file.path, file.kind) == (str(where / "data-00000-of-00001.arrow"), "arrow")
    with pytest.raises(ValueError, match="has no split 'valid'; set --split to one of train, test"):
        input_corpus([str(tmp_path)], "valid")


@pytest.mark.parametrize("state", ["{}", "[]", "{", '{"_data_files": [3]}'])
def test_a_folder_that_only_looks_like_a_saved_dataset_is_refused(tmp_path, state):
    write_files(tmp_path, "dataset_info.json")
    (tmp_path / "state.json").write_text(state)
    with pytest.raises(ValueError, match=r"state.json is not as `datasets` saves it .*; save it again, or give the"):
        names(tmp_path)


def test_what_is_not_there_is_refused_by_flag_value_and_fix(tmp_path):
    with pytest.raises(ValueError, match=r"--input .*nowhere' is not there; give"):
        names(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"--input '' names nothing; give .* \. for the current one"):
        input_corpus([""])
    with pytest.raises(ValueError, match=r"--input .* holds no file that can be read; give"):
        names(tmp_path)


def test_an_unknown_corpus_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="--corpus 'wiki' is unknown; use stdlib or torch"):
        named_corpus("wiki")


def test_a_missing_package_is_answered_with_the_pip_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)  # makes the import fail
    with pytest.raises(ValueError, match=r"run pip install -e '.\[datasets\]' in the checkout"):
        input_corpus(["hf:somebody/something"])


def test_what_prepare_writes_is_left_out_through_a_link_too(tmp_path):
    (tmp_path / "data/out").mkdir(parents=True)
    (tmp_path / "data/out/train.bin").touch()
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.txt").touch()
    (tmp_path / "in/link").symlink_to(tmp_path / "data")
    corpus = input_corpus([str(tmp_path / "in")])
    assert [file.name for file in corpus.files] == ["a.txt", "link/out/train.bin"]
    assert [file.name for file in corpus.outside(tmp_path / "data/out").files] == ["a.txt"]

"""A corpus's files are read in a fixed order, each once; a missing file is refused with flag, value and fix."""

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


def test_files_of_a_folder_are_sorted_and_inputs_come_in_the_order_they_are_given(tmp_path):
    write_files(tmp_path, "b.txt", "a/z.md", "a.txt")
    (tmp_path / "c.txt").symlink_to(tmp_path / "gone")  # a broken link is no file
    assert names(tmp_path) == ["a.txt", "a/z.md", "b.txt"]
    assert names(tmp_path / "b.txt", tmp_path / "a") == ["b.txt", "z.md"]


def test_what_lies_beside_tables_is_passed_over_with_a_line(tmp_path, caplog, monkeypatch):
    others = ("README.md", "infos.json.zst", "a.csv", "x.json", *(f"{n}.py" for n in range(7)))
    write_files(tmp_path, "data/x.parquet", *others)
    monkeypatch.setitem(sys.modules, "zstandard", None)  # files passed over do not need it
    alone, named = (input_corpus([str(tmp_path), *more]) for more in ([], [str(tmp_path / "README.md")]))
    assert [file.name for file in alone.files] == ["data/x.parquet"]
    assert [file.name for file in named.files] == ["data/x.parquet", "README.md"]
    told, of_others = (record.getMessage() for record in caplog.records)
    first = ", ".join(f"{tmp_path}/{name}" for name in [*(f"{n}.py" for n in range(7)), "README.md"])
    assert told == (
        f"--input: passed over 11 files (44 bytes) beside Parquet or Arrow: {first} and 3 more; name one by --input to "
        "have it read, or told why not"
    )
    assert of_others.startswith("--input: passed over 10 files (")


@pytest.mark.parametrize("content", [b"\x89PNG\r\n\x1a\n\0\0", b"%PDF-1.7"])
def test_what_is_no_text_is_refused_by_name_or_passed_over_with_a_line(tmp_path, caplog, content):
    (tmp_path / "x").mkdir()
    (tmp_path / "x/y.bin").write_bytes(content)
    for path in (tmp_path / "x", tmp_path / "x/y.bin"):
        told = rf"--input '{path}' holds no text in UTF-8, but y.bin; give text, .jsonl, "
        with pytest.raises(ValueError, match=told):
            names(path)
    write_files(tmp_path, "x/a.txt")
    assert names(tmp_path / "x") == ["a.txt"]
    told = f"--input: passed over 1 file ({len(content)} bytes) that are no text in UTF-8: {tmp_path}/x/y.bin; name one"
    assert caplog.records[-1].getMessage().startswith(told)


def test_hidden_and_left_out_places_are_not_read(tmp_path):
    write_files(tmp_path, "json/a.py", "json/tests/b.py", "test/c.py", ".git/f.py", ".g.py", "h")
    found = folder_files(tmp_path, suffix=".py", left_out=frozenset({"test", "tests"}))
    assert [file.name for file in found] == ["json/a.py"]
    assert names(tmp_path) == ["h", "json/a.py", "json/tests/b.py", "test/c.py"]


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
    assert input_corpus(["a"]) == input_corpus(["./a/"])


def test_named_corpora_are_without_tests_and_torch_is_not_imported(monkeypatch):
    paths = [file.name for file in named_corpus("stdlib").files]
    assert paths == sorted(paths)
    assert "json/decoder.py" in paths
    assert not [path for path in paths if {"test", "tests", "idlelib", "site-packages"} & set(path.split("/"))]
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert "nn/modules/linear.py" in [file.name for file in named_corpus("torch").files]
    assert "torch" not in sys.modules


def test_of_a_saved_dataset_the_split_s_own_files_are_read(tmp_path):
    state = json.dumps({"_data_files": [{"filename": "data-0.arrow"}]})
    for split in ("train", "test"):
        write_files(tmp_path / split, "data-0.arrow", "dataset_info.json", "stale.arrow")
        (tmp_path / split / "state.json").write_text(state)
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    for split, folder in (("train", tmp_path), ("test", tmp_path), ("train", tmp_path / "test")):
        (file,) = input_corpus([str(folder)], split).files
        where = folder / split if folder == tmp_path else folder
        assert (file.path, file.kind) == (str(where / "data-0.arrow"), "arrow")
    with pytest.raises(ValueError, match="has no split 'valid'; set --split to one of train, test"):
        input_corpus([str(tmp_path)], "valid")
    for state in ("{}", "[]", "{"):
        (tmp_path / "test/state.json").write_text(state)
        with pytest.raises(
            ValueError, match=r"state.json is not as `datasets` saves it .*; save it again, or give the"
        ):
            names(tmp_path / "test")


def test_what_is_not_there_is_refused_by_flag_value_and_fix(tmp_path):
    for path, told in (
        (str(tmp_path / "nowhere"), r"--input .*nowhere' is not there; give"),
        ("", r"--input '' names nothing; give .* \. for the current one"),
        (str(tmp_path), r"--input .* holds no file that can be read; give"),
    ):
        with pytest.raises(ValueError, match=told):
            input_corpus([path])


def test_a_missing_package_is_answered_with_the_pip_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)  # makes the import fail
    with pytest.raises(ValueError, match=r"run pip install -e '.\[datasets\]' in the checkout"):
        input_corpus(["hf:somebody/something"])


def test_what_prepare_writes_is_left_out_through_a_link_too(tmp_path):
    write_files(tmp_path, "data/out/train.bin", "in/a.txt")
    (tmp_path / "in/link").symlink_to(tmp_path / "data")
    corpus = input_corpus([str(tmp_path / "in")])
    assert [file.name for file in corpus.files] == ["a.txt", "link/out/train.bin"]
    assert [file.name for file in corpus.outside(tmp_path / "data/out").files] == ["a.txt"]

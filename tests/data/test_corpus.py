import hashlib
import sys
from pathlib import Path

import pytest

from megamix.data.corpus import Corpus, directory_corpus, list_corpus, named_corpus, read_documents


def write_files(root: Path, contents: dict[str, bytes]) -> None:
    for name, content in contents.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)


def test_every_text_file_is_listed_in_sorted_order_with_size_and_checksum(tmp_path: Path) -> None:
    write_files(tmp_path, {"b.txt": b"two", "a/z.md": "Käse".encode(), "a.txt": b"one", "empty.txt": b""})
    listing = list_corpus(directory_corpus(tmp_path))
    assert [file.path for file in listing.files] == ["a.txt", "a/z.md", "b.txt"]
    assert listing.files[1].num_bytes == 5
    assert listing.files[1].sha256 == hashlib.sha256("Käse".encode()).hexdigest()
    assert listing.num_bytes == 11


def test_documents_come_in_the_order_of_the_listing(tmp_path: Path) -> None:
    write_files(tmp_path, {"b.txt": b"two\r\n", "a.txt": b"one"})
    corpus = directory_corpus(tmp_path)
    assert list(read_documents(corpus, list_corpus(corpus).files)) == [("a.txt", "one"), ("b.txt", "two\r\n")]


def test_undecodable_files_are_skipped_and_counted(tmp_path: Path) -> None:
    write_files(tmp_path, {"good.txt": b"text", "latin.txt": b"K\xe4se"})
    listing = list_corpus(directory_corpus(tmp_path))
    assert [file.path for file in listing.files] == ["good.txt"]
    assert listing.undecodable == ("latin.txt",)


def test_hidden_and_left_out_places_are_not_read(tmp_path: Path) -> None:
    write_files(
        tmp_path,
        {
            "json/a.py": b"1",
            "json/tests/b.py": b"2",
            "test/c.py": b"3",
            "site-packages/d/e.py": b"4",
            ".git/f.py": b"5",
            ".g.py": b"6",
            "notes.txt": b"7",
        },
    )
    corpus = Corpus(flag="", root=tmp_path, suffix=".py", left_out=named_corpus("stdlib").left_out)
    assert [file.path for file in list_corpus(corpus).files] == ["json/a.py"]


def test_the_user_s_own_folders_named_test_are_read(tmp_path: Path) -> None:
    write_files(tmp_path, {"test/c.txt": b"3"})
    assert [file.path for file in list_corpus(directory_corpus(tmp_path)).files] == ["test/c.txt"]


def test_a_broken_link_is_no_file(tmp_path: Path) -> None:
    write_files(tmp_path, {"a.txt": b"1"})
    (tmp_path / "b.txt").symlink_to(tmp_path / "gone")
    assert [file.path for file in list_corpus(directory_corpus(tmp_path)).files] == ["a.txt"]


def test_the_standard_library_is_a_corpus_of_several_megabytes_without_tests() -> None:
    listing = list_corpus(named_corpus("stdlib"))
    paths = [file.path for file in listing.files]
    assert paths == sorted(paths)
    assert "json/decoder.py" in paths
    assert not [path for path in paths if {"test", "tests", "idlelib", "site-packages"} & set(path.split("/"))]
    assert listing.num_bytes > 5e6


def test_torch_is_found_without_importing_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    corpus = named_corpus("torch")
    assert (corpus.root / "nn" / "modules" / "linear.py").is_file()
    assert "torch" not in sys.modules


@pytest.mark.parametrize("contents", [{}, {"a.txt": b""}, {"a.txt": b"\xff\xfe", "b.txt": b"\x80"}])
def test_an_empty_corpus_is_refused_by_flag_value_and_fix(tmp_path: Path, contents: dict[str, bytes]) -> None:
    write_files(tmp_path, contents)
    with pytest.raises(ValueError, match=rf"--input {tmp_path} holds no text.* give a directory with text files"):
        list_corpus(directory_corpus(tmp_path))


def test_a_missing_input_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--input .*nowhere.* is not a directory; give"):
        directory_corpus(tmp_path / "nowhere")


def test_an_unknown_corpus_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="--corpus 'wiki' is unknown; use stdlib or torch"):
        named_corpus("wiki")


def test_a_file_that_changes_between_listing_and_reading_is_refused(tmp_path: Path) -> None:
    write_files(tmp_path, {"a.txt": b"one"})
    corpus = directory_corpus(tmp_path)
    files = list_corpus(corpus).files
    write_files(tmp_path, {"a.txt": b"two"})
    with pytest.raises(ValueError, match=r"a\.txt changed"):
        list(read_documents(corpus, files))

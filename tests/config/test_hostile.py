"""Whoever names a wrong file as base, or whose editor slips: a base configuration that is a folder, a circle, no text
or no TOML is refused with one line; any bytes load or are refused; CONFIG may be a pipe.
"""

import os
import random
import threading
from pathlib import Path

import pytest

from megamix.config import ConfigError, load_config
from tests.config.test_load import MINIMAL, problems_of, write
from tests.conftest import FULL

ROOT = Path(__file__).parents[2]
BASES = {
    "folder": (lambda path: path.mkdir(), "cannot be read: Is a directory; write the path of a TOML file"),
    "circle of files": (lambda path: path.symlink_to("job.toml"), "files inherit in a circle: "),
    "no text": (
        lambda path: path.write_bytes(b"\xff\xfe"),
        "cannot be read: it is no text in UTF-8, so no TOML; write the path",
    ),
    "open text": (lambda path: path.write_text("a = '''"), "is no TOML"),
    "a number of thousands of digits": (lambda path: path.write_text("a = " + "9" * 5000), "is no TOML"),
}


@pytest.mark.parametrize("kind", BASES)
def test_a_base_that_is_no_configuration_is_refused_in_a_line(kind, tmp_path):
    """A user who names the wrong file as base."""
    make, told = BASES[kind]
    make(tmp_path / "base.toml")
    (problem,) = problems_of(write(tmp_path, "job.toml", 'base = "base.toml"\n'))
    assert told in problem


def test_depth_is_that_of_toml_and_not_of_its_texts(tmp_path):
    text = MINIMAL.replace('"tokens/train"', f'"{"[." * 50}"  # {"a." * 50} {"[" * 50} \'\'\' """')
    assert load_config(write(tmp_path, "a.toml", text)).data.train[0].path == "[." * 50
    mixture = ", ".join(f'{{ path = "a.b.c/{number}.x", weight = 1.0 }}' for number in range(500))
    config = load_config(write(tmp_path, "b.toml", MINIMAL.replace('"tokens/train"', f"[{mixture}]")))
    assert len(config.data.train) == 500


def test_the_file_itself_may_be_a_pipe(tmp_path):
    """A user of a shell, who writes megamix train <(generate)."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    writer = threading.Thread(target=path.write_text, args=(MINIMAL,))  # waits until somebody reads
    writer.start()
    assert load_config(path).training.steps == 10
    writer.join()
    readable, writable = os.pipe()
    os.write(writable, MINIMAL.encode())
    os.close(writable)
    assert load_config(f"/dev/fd/{readable}").training.steps == 10
    os.close(readable)


@pytest.mark.uncounted
def test_no_change_of_a_file_s_bytes_ends_in_anything_but_lines(tmp_path):
    """Bit rot, and a slip of an editor."""
    whole = (ROOT / "configs/base.toml").read_bytes()
    pieces = [b"[", b"]", b"{", b"}", b"=", b".", b'"', b"'", b'"""', b"\n", b"\0", b"\xff", b"\r", b"1e999", b"#"]
    loaded = refused = 0
    for seed in range(5000 if FULL else 60):
        rng = random.Random(seed)
        data = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(data))
            data[at : at + rng.choice([0, 0, 1, 20])] = rng.choice(pieces) * rng.choice([1, 1, 3])
        (tmp_path / "job.toml").write_bytes(data)
        try:
            load_config(tmp_path / "job.toml")
            loaded += 1
        except ConfigError as error:
            refused += 1
            odd = [line for line in error.problems if len(line) > 1000]
            assert not odd, seed
    assert loaded > 5 < refused

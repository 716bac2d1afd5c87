"""A base configuration that is a device, a pipe, a circle, huge or deep is refused with one line, within 5 s and 500
MB; any bytes load or are refused.
"""

from __future__ import annotations

import json
import os
import random
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from megamix.config import ConfigError, load_config
from megamix.config.load import MOST_BYTES, MOST_FILES
from tests.config.test_load import MINIMAL, problems_of, write
from tests.conftest import FULL

ROOT = Path(__file__).parents[2]
SECONDS, MEGABYTES, MOST_LINES = 5, 500, 110
MANY = 25_000 if FULL else 8_000  # about as many as a file has room for


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))


def _circle_of_links(path: Path) -> None:
    path.symlink_to(path.name)


def _folder(path: Path) -> None:
    path.mkdir()


def _chain(path: Path) -> None:
    for number in range(1500):
        write(path.parent, f"{number}.toml", f'base = "{number + 1}.toml"\n')
    path.symlink_to("0.toml")


def _text(text: str) -> Callable[[Path], None]:
    return lambda path: path.write_text(text, encoding="utf-8") and None


BASES: dict[str, tuple[Callable[[Path], object], str]] = {
    "fifo": (_fifo, "cannot be read: it is a pipe"),
    "socket": (_socket, "cannot be read: it is a socket"),
    "device": (lambda path: path.symlink_to("/dev/zero"), "cannot be read: it is a device"),
    "folder": (_folder, "cannot be read: it is a folder"),
    "circle of links": (_circle_of_links, "cannot be read: Too many levels of symbolic links"),
    "circle of files": (lambda path: path.symlink_to("job.toml"), "files inherit in a circle: "),
    "1,500 deep": (_chain, f"the {MOST_FILES}th file in a row; make some of them one"),
    "nested arrays": (_text("a = " + "[" * 100_000), "holds values within more than 8 others"),
    "nested tables": (_text("a = " + "{a = " * 50_000), "holds values within more than 8 others"),
    "a key of 50,000 parts": (_text("a." * 50_000 + "a = 1"), "holds a key of more than 8 parts"),
    "quoted parts": (_text('"a=#".' * 30_000 + "a = 1"), "holds a key of more than 8 parts"),
    "a table of 50,000 parts": (_text("[" + "a . " * 50_000 + "a]"), "holds a key of more than 8 parts"),
    "behind a text of lines": (_text('x = """\n\' """\n' + "a." * 50_000 + "a = ''"), "a key of more than 8 parts"),
    "behind five quotes": (
        _text('x = {a = """z""""", ' + "a." * 50_000 + 'a = 1, c = ""}'),
        "a key of more than 8 parts",
    ),
    "huge": (lambda path: path.open("wb").truncate(2**40), f"a configuration has {MOST_BYTES // 1024} KiB at most"),
    "no text": (
        lambda path: path.write_bytes(b"\xff\xfe"),
        "cannot be read: it is no text in UTF-8, so no TOML; write the path",
    ),
    "open text": (_text("a = '''" + '"""\\"\'' * 30_000), "is no TOML"),
    "thousands of keys": (_text("[model]\n" + "".join(f"k{n}=1\n" for n in range(MANY))), "more like these"),
    "a long key": (_text("a" * 200_000 + " = 1"), "unknown key"),
    "odd weights": (
        lambda path: path.write_text(
            "[data]\ntrain = ["
            + ",".join(f"{{path='{n}',weight=0.{n * 7919 % 10007:05}1}}" for n in range(MANY * 3 // 4))
            + "]"
        ),
        "must have weights that are whole multiples",
    ),
    "huge sizes": (_text("[model]\nnum_heads = 1000000000039\nnum_kv_heads = 999999999999"), "must divide num_heads"),
    "a list of wrong tables": (_text("[data]\ntrain = [" + "{a=1}," * MANY + "]"), "more like these"),
}


# Each configuration in turn: what is wrong with it, and the CPU's seconds until that was known.
READ_ALL = """
import json, sys, time
from megamix.config import ConfigError, load_config
for path in sys.argv[1:]:
    begin = time.process_time()
    try:
        load_config(path)
    except ConfigError as error:
        print(json.dumps([error.problems, time.process_time() - begin]))
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[list[str], float]]:
    """By kind, of a process that gets no more memory than allowed."""
    paths = []
    for make, _ in BASES.values():
        folder = tmp_path_factory.mktemp("hostile")
        paths.append(str(write(folder, "job.toml", 'base = "base.toml"\n')))
        make(folder / "base.toml")

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (MEGABYTES * 2**20, MEGABYTES * 2**20))

    command = [sys.executable, "-c", READ_ALL, *paths]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, preexec_fn=limit, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(zip(BASES, map(json.loads, done.stdout.splitlines()), strict=True))


@pytest.mark.parametrize("kind", BASES)
def test_a_hostile_base_is_refused_in_a_line_soon_and_in_little_memory(kind: str, answers) -> None:
    problems, seconds = answers[kind]
    assert any(BASES[kind][1] in line for line in problems), problems[:3]
    assert len(problems) <= MOST_LINES
    assert all(len(line) < 5000 and line.isprintable() for line in problems)
    assert seconds < SECONDS


def test_a_path_that_no_file_can_have_is_refused(tmp_path: Path) -> None:
    for base in ("a\\u0000b", "x" * 5000, "\\u001b[31m", "/dev/null", "/proc/self/mem"):
        (problem,) = problems_of(write(tmp_path, "job.toml", f'base = "{base}"\n'))
        assert problem.startswith("base: got ")
        assert problem.isprintable()
        assert len(problem) < 1000


def test_overrides_are_bounded_too(tmp_path: Path) -> None:
    path = write(tmp_path, "job.toml", MINIMAL)
    deep = ".".join(["model"] + ["a"] * 30_000)
    steering = "model.norm=\x9b31m\u202e"
    for override in (
        steering,
        f"{deep}=1",
        f"model.norm={'[' * 30_000}",
        f"model.norm={{{'a.' * 30_000}a = 1}}",
        "a\nb.c=1",
    ):
        (problem,) = problems_of(path, override)
        assert problem.isprintable()
        assert len(problem) < 1000


def test_bases_up_to_the_limit_are_read_and_links_to_one_file_are_no_circle(tmp_path: Path) -> None:
    write(tmp_path, f"{MOST_FILES - 1}.toml", MINIMAL)
    for number in range(MOST_FILES - 1):
        write(tmp_path, f"{number}.toml", f'base = "{number + 1}.toml"\n')
    assert load_config(tmp_path / "0.toml").training.steps == 10
    assert load_config(tmp_path / "0.toml") == load_config(tmp_path / f"{MOST_FILES - 1}.toml")
    write(tmp_path, "more.toml", 'base = "0.toml"')
    assert "in a row" in problems_of(tmp_path / "more.toml")[0]


def test_depth_is_that_of_toml_and_not_of_its_texts(tmp_path: Path) -> None:
    text = MINIMAL.replace('"tokens/train"', f'"{"[." * 50}"  # {"a." * 50} {"[" * 50} \'\'\' """')
    assert load_config(write(tmp_path, "a.toml", text)).data.train[0].path == "[." * 50
    mixture = ", ".join(f'{{ path = "a.b.c/{number}.x", weight = 1.0 }}' for number in range(500))
    config = load_config(write(tmp_path, "b.toml", MINIMAL.replace('"tokens/train"', f"[{mixture}]")))
    assert len(config.data.train) == 500


def test_the_file_itself_may_be_a_pipe(tmp_path: Path) -> None:
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


def test_a_pipe_that_nobody_writes_or_that_does_not_end_is_no_wait_for_ever(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("megamix.config.load._WRITER_S", 0.01)
    path = tmp_path / "pipe"
    os.mkfifo(path)
    assert "model.vocab_size: missing" in problems_of(path)[0]
    with subprocess.Popen(["cat", "/dev/zero"], stdout=subprocess.PIPE) as endless:
        assert endless.stdout is not None
        (problem,) = problems_of(Path(f"/dev/fd/{endless.stdout.fileno()}"))
        endless.kill()
    assert "KiB at most" in problem


@pytest.mark.uncounted
def test_no_change_of_a_file_s_bytes_ends_in_anything_but_lines(tmp_path: Path) -> None:
    whole = (ROOT / "configs/base.toml").read_bytes()
    pieces = [
        b"[",
        b"]",
        b"{",
        b"}",
        b"=",
        b".",
        b'"',
        b"'",
        b'"""',
        b"\n",
        b"\0",
        b"\xff",
        b"\r",
        b"1e999",
        b"#",
        b"a.b.",
    ]
    loaded = refused = 0
    for seed in range(5000 if FULL else 60):
        rng = random.Random(seed)
        data = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(data))
            data[at : at + rng.choice([0, 0, 1, 20])] = rng.choice(pieces) * rng.choice([1, 1, 3, 2000])
        (tmp_path / "job.toml").write_bytes(data)
        try:
            load_config(tmp_path / "job.toml")
            loaded += 1
        except ConfigError as error:
            refused += 1
            odd = [line for line in error.problems if not line.isprintable() or len(line) > 1000]
            assert not odd, seed
    assert loaded > 5 < refused

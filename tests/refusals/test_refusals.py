"""Whoever starts the ranks of a job with different settings, goes on with a run under a changed configuration, or
mistypes one, is answered in one line with the key, both values and the fix. The tables beside this file have a row for
each case; `said` is the whole answer on the day when it was recorded, which `MEGAMIX_RECORD=1` writes anew.
"""

import os
import re
import shutil
import sys
import threading
import tomllib
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest
import torch.distributed as dist

from megamix.checkpoint.manifest import UNTRAINED
from megamix.cli import verbs
from megamix.cli.verbs import main
from megamix.config import ConfigError, load_config
from megamix.config.toml_text import tables_to_toml, value_text
from megamix.train.own_code import own_code
from megamix.train.ranks_agree import check_same_job, started_with
from megamix.train.resume_rules import RNG_RULE, trained_on
from tests.builders import corpus_of, run_on_ranks, write_data
from tests.checkpoint.seal import edit
from tests.conftest import FULL

HERE = Path(__file__).parent
KINDS = ("ranks", "resume", "check")
STEPS = 3  # of the runs whose checkpoints are gone on from
CHECKPOINT = f"checkpoints/step_{STEPS:08d}"
PLUGINS = tomllib.loads((HERE / "plugged.toml").read_text(encoding="utf-8"))["plugins"]
CODE = cache(own_code)
PARSER = verbs._parser
RECORDS = os.environ.get("MEGAMIX_RECORD") == "1"
TOP = 'base = "../tiny.toml"\n'
FILES = {
    "file": "", "ran/metrics.jsonl": "", "mine/config.toml": "", "lonely.bin": "", "elsewhere/manifest.json": "",
    "broken/tokenizer.json": "{}", "broken.toml": "[model\n", "circle.toml": 'base = "circle.toml"\n',
    "job.yaml": "model:\n  size: 3\n", "copies/config.toml": f'{TOP}[checkpoint]\nfolder = "another"\n',
    "theirs/config.toml": f'{TOP}[metrics.alert]\ncommand = ["touch", "started"]\n', "theirs/metrics.jsonl": "",
    "hostile/config.toml": f'plugins = ["hostile"]\n{TOP}', "hostile/metrics.jsonl": "",
    "hf/config.json": '{"model_type": "llama", "max_position_embeddings": 16, "hidden_size": 32, "vocab_size": 64}',
}  # fmt: skip


@cache
def parser_of(verb):
    return PARSER([verb])


def table(kind):
    return tomllib.loads((HERE / f"{kind}.toml").read_text(encoding="utf-8"))["row"]


def rows(kind):
    """Return the rows as pytest takes them."""
    for row in table(kind):
        marks = []
        if "full" in row and not (FULL or RECORDS):  # it imports much
            marks.append(pytest.mark.skip("imports transformers: only by --full"))
        yield pytest.param(row, id=row["name"], marks=marks)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A working folder with jobs, tokens and what a mistake may name."""
    folder = tmp_path_factory.mktemp("place")
    write_data(folder / "data", tokenizer=True)
    shutil.copytree(folder / "data", folder / "same")
    for name in ("tiny.toml", "plugged.toml", "tracked.toml"):
        shutil.copy(HERE / name, folder)
    for name, text in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    shutil.copytree(folder / "data", folder / "other")
    content = bytearray((folder / "other/train.bin").read_bytes())
    content[1000] ^= 1
    (folder / "other/train.bin").write_bytes(content)
    (folder / "cut.bin").write_bytes((folder / "data/valid.bin").read_bytes()[:100])
    shutil.copy(folder / "data/valid.idx", folder / "cut.idx")
    with (folder / "other/tokenizer.json").open("a") as file:
        file.write("\n")
    return folder


@pytest.fixture(autouse=True)
def in_place(request, row, place, monkeypatch):
    """Work there, as no rank of a job. Import a row's plugins anew, and parsers and sources once for all rows."""
    monkeypatch.chdir(place)
    monkeypatch.setattr("megamix.cli.verbs._parser", lambda argv: parser_of(argv[0]))
    monkeypatch.setattr("megamix.train.judge.own_code", CODE)
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in row.get("environment", {}).items():
        monkeypatch.setenv(name, value)
    if "plug" in str(row):
        request.getfixturevalue("doors")
    yield
    for name in PLUGINS:
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def saved(place):
    """Run a job for a few steps at its first use. Return its folder, and where it is kept until a row needs it."""

    @cache
    def run(base):
        config = load_config(base, [f"training.steps={STEPS}"])
        run_on_ranks(config)
        folder = place / config.checkpoint.folder
        return folder, folder.rename(place / f"kept_{folder.name}")

    return run


@pytest.fixture(scope="module", autouse=True)
def answers():
    """Collect what is said; write it into the tables if that is asked for."""
    told = {kind: {} for kind in KINDS}
    yield told
    for kind, found in told.items() if RECORDS else ():
        head = (HERE / f"{kind}.toml").read_text(encoding="utf-8").partition("[[row]]")[0]
        text = "".join(_row_text(row, found.get(row["name"], row.get("said"))) for row in table(kind))
        (HERE / f"{kind}.toml").write_text(head + text.rstrip("\n") + "\n", encoding="utf-8")


def _row_text(row, said):
    keys = "".join(f"{key} = {_text(value)}\n" for key, value in row.items() if key != "said")
    return f"[[row]]\n{keys}said = '''{said}'''\n\n"


def _text(value):
    """Return a value as TOML; a text as it stands, if that can be."""
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return f"[{', '.join(map(_text, value))}]"
    plain = isinstance(value, str) and '"' in value and not re.search(r"['\n]", value)
    return f"'{value}'" if plain else value_text(value)


# One function for each kind: how the code of today is asked.


def ranks_say(row):
    """Return the lines with which ranks 0 and 2, started with `one`, and rank 1, with `other`, are refused."""
    base, store, ended = row.get("base", "tiny.toml"), dist.HashStore(), {}
    one, other = load_config(base, row["one"]), load_config(row.get("other_base", base), row["other"])

    def check(rank):
        config = other if rank == 1 else one
        started = started_with(config.values, CODE(config.plugins)) | (
            row.get("code_of_other", {}) if rank == 1 else {}
        )
        try:
            check_same_job(started, corpus_of(config), store, 60.0, rank, 3)
            ended[rank] = []
        except ConfigError as error:
            ended[rank] = [*error.problems]

    ranks = [threading.Thread(target=check, args=(rank,)) for rank in range(3)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert ended[0] == ended[1] == ended[2]
    return ended[0]


@contextmanager
def saved_otherwise(row, folder, kept):
    """Put the run in its folder, with the checkpoint of a run of `saved`."""
    path = kept.rename(folder) / CHECKPOINT
    manifest = (path / "manifest.json").read_bytes()
    config = load_config(row.get("base", "tiny.toml"), row["saved"])

    def change(fields):
        record = {"config": config.text, "fingerprints": trained_on(corpus_of(config).fingerprints())}
        record |= {"code": CODE(config.plugins), "rng_rule": RNG_RULE}
        record |= {"rng_rule": row.get("rng_rule", RNG_RULE), "code": record["code"] | row.get("code", {})}
        for old, new in row.get("edited", []):
            assert old in record["config"]
            record["config"] = record["config"].replace(old, new)
        fields["run"] |= record
        if row.get("weights_only"):
            fields["run"] |= {"config": tables_to_toml({"model": config.model.model_dump()}), "progress": {}}
            params = [param | {"states": 0} for param in fields["params"]]
            fields.update(applied_updates=0, states=[UNTRAINED], params=params)

    edit(path, change)
    try:
        yield
    finally:
        (path / "manifest.json").write_bytes(manifest)
        folder.rename(kept)


def check_says(row, given, capsys):
    """Return whether the job passes, and the lines on its keys."""
    job = row.get("base", "tiny.toml")
    if "file" in row:
        job = "job.toml"
        Path(job).write_text(row["file"], encoding="utf-8")
    capsys.readouterr()
    status = main(["train", job, *given, *([] if row.get("starts") else ["--check"])])
    said = capsys.readouterr()
    assert status == (0 if "passes" in row else 2), said
    if status:
        return [line.strip() for line in said.err.splitlines()[1:]]
    return re.findall(r"^(?:note: |megamix train: |  changed since: |  (?=checkpoint\.resume: ))(.*)", said.out, re.M)


def assert_answered(row, lines):
    """Hold an answer to have a line for each key that it may name, and in that of `key` all that matters. Return it."""
    of_key = [line for line in lines if _names(line, row["key"])]
    assert len(of_key) == row.get("lines", 1), lines
    parts = [*row.get("values", []), row.get("fix", "")]
    lacking, line = min(([part for part in parts if not _is_in(part, line)], line) for line in of_key)
    assert lacking == [], line
    also = row.get("also", [])
    assert [key for key in also if not any(_names(other, key) for other in lines)] == [], lines
    assert [other for other in lines if other not in of_key and not any(_names(other, key) for key in also)] == []
    return line


def _names(line, key):
    return re.match(rf"{re.escape(key)}(?![\w.\[-])", line)


def _is_in(part, line):
    """Return whether a line has a part; a number or a word as a whole. Numbers of ranks are none."""
    line = re.sub(r" on ranks? \d+(, \d+)*", "", line)
    return re.search(rf"(?<![\w.]){re.escape(part)}(?![\w])", line) if re.fullmatch(r"[\w.]+", part) else part in line


def _told(lines, place):
    return "\n".join(lines).replace(f"{place}/", "")


def _judge(row, lines):
    """Hold an answer against its row. Return the line on the key; None if there is to be none."""
    if row.get("passes") == "in silence":
        assert lines == []
        return None
    return assert_answered(row, lines)


@pytest.mark.parametrize("row", [*rows("ranks")])
def test_ranks_that_differ_are_told_the_key_the_values_and_the_fix(row, place, answers):
    lines = ranks_say(row)
    answers["ranks"][row["name"]] = _told(lines, place)
    line = _judge(row, lines)
    assert line is None or re.search(" on ranks 0, 2; .* on rank 1; ", line)


@pytest.mark.parametrize("row", [*rows("resume")])
def test_a_run_that_goes_on_otherwise_is_refused_or_told(row, place, saved, answers, capsys):
    with saved_otherwise(row, *saved(row.get("base", "tiny.toml"))):
        lines = check_says(row, row["now"], capsys)
    answers["resume"][row["name"]] = _told(lines, place)
    _judge(row, lines)


@pytest.mark.parametrize("row", [*rows("check")])
def test_a_configuration_that_is_wrong_by_itself_is_told_with_a_fix_that_works(row, place, answers, capsys):
    lines = check_says(row, row["given"], capsys)
    answers["check"][row["name"]] = _told(lines, place)
    line = _judge(row, lines)
    mended = row.get("mended", [])
    written = re.search(r"; write (?:for example )?([\w.]+) = (.+?)(?=,? or |, and |$)", line or "")
    if written and not mended and "[" not in row["key"] and row.get("fix_works", True):
        name, value = written.groups()
        mended = [f"{name if '.' in name else row['key'].rpartition('.')[0] + '.' + name}={value}"]
    if mended and "file" not in row:
        load_config(row.get("base", "tiny.toml"), [*row["given"], *mended])

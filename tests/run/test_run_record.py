"""A manifest with a valid checksum that no run can have written is refused by name, and the older checkpoint is taken;
mutated manifests are refused, or training from them works.
"""

from __future__ import annotations

import json
import math
import os
import random
import resource
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from megamix.builders.data import data_fingerprints
from megamix.checkpoint.all_or_none import AllOrNone
from megamix.checkpoint.folder import checkpoints
from megamix.checkpoint.load import read_on_all
from megamix.checkpoint.manifest import DamagedCheckpoint, read_manifest
from megamix.checkpoint.verify import read_checkpoint
from megamix.cli import main
from megamix.comm.collectives import Collectives
from megamix.comm.topology import Axis
from megamix.config import Config, ConfigError
from megamix.run.batch_plan import BatchPlan
from megamix.run.resume import Start, find_start
from megamix.run.run_record import check_run
from megamix.supervise.status import PreemptedError
from tests.checkpoint.seal import edit, seal
from tests.checkpoint.state import alone
from tests.conftest import FULL
from tests.train.jobs import Record, attempts_recorded, overflows_injected, run_on_ranks, tiny_job

MUTANTS = 5_000 if FULL else 100
TRAINED = 5_000 if FULL else 1  # number of accepted mutants that are trained on
LONGEST_S, MOST_BYTES = 2.0, 200 << 20  # seconds of one mutant; bytes beyond an intact manifest's
SCALES = ("dynamic", "headroom", "torch", "megatron", "deepspeed")

Change = Callable[[dict[str, Any]], object]


def _config(data: Path, folder: Path, loss_scale: str = "dynamic", steps: int = 12, resume: str = "auto") -> Config:
    longer = {} if loss_scale == "headroom" else {"growth_interval": 1000}  # longer than any run here
    return tiny_job(
        folder,
        tokens=data,
        data={"valid": None},
        model={"num_layers": 1, "dropout": 0.1},
        precision={"loss_scale": {"rule": loss_scale, "init_scale": 2.0**4} | longer},
        training={"steps": steps, "eval_interval": 0},
        checkpoint={"resume": resume, "save_interval": 3, "async_save": False},
        metrics={"tensorboard": False, "log_interval": 50},
    )  # fmt: skip


def _interrupted(config: Config, leave_at: int) -> None:
    """Run until it is asked to leave. Attempt 3 overflows, and from 5 on all do, so that batches wait at the end."""
    record = Record()

    def leave(plan: BatchPlan) -> None:
        if plan.launched == leave_at:
            os.kill(os.getpid(), signal.SIGTERM)

    with (
        suppress(PreemptedError),
        attempts_recorded(record, leave),
        overflows_injected(record, frozenset((3, 5, 6, 7, 8)), frozenset()),
    ):
        run_on_ranks(config)


@pytest.fixture(scope="module")
def ready(data, tmp_path_factory) -> Path:
    """Leave a run that was asked to stop: two checkpoints, the newer with batches that wait."""
    folder = Path(tmp_path_factory.mktemp("ready"))
    _interrupted(_config(data, folder), 6)
    (newest, _) = checkpoints(folder / "run/checkpoints")
    progress = read_manifest(newest / "manifest.json").run.progress
    assert progress["waiting"]
    assert progress["interval_losses"]
    return folder


@pytest.fixture
def run(ready, tmp_path) -> Path:
    """Return a copy of the run, to be damaged."""
    return Path(shutil.copytree(ready, tmp_path / "copy"))


def _progress(**values: Any) -> Change:
    return lambda fields: fields["run"]["progress"].update(values)


def _in_config(old: str, new: str) -> Change:
    def change(fields: dict[str, Any]) -> None:
        assert old in fields["run"]["config"]
        fields["run"]["config"] = fields["run"]["config"].replace(old, new)

    return change


WAITING = {"samples": [[24, 8]], "tries": 1, "counted_tries": 0, "due_in": 0}
WRONG: dict[str, tuple[Change, str]] = {
    "counters": (lambda fields: fields.update(applied_updates=39), "applied"),
    "attempts": (_progress(attempts=1), "attempts is 1"),
    "a cursor of 0": (_progress(cursor=0), "cursor is 0"),
    "a cursor of 2**53": (_progress(cursor=2**53), "cursor is"),
    "no scale worked": (_progress(last_applied_scale=None), "last_applied_scale"),
    "an odd scale worked": (_progress(last_applied_scale=3.0), "last_applied_scale"),
    "losses": (_progress(interval_losses=["zz"]), "interval_losses"),
    "a loss beyond FP32": (_progress(interval_losses=[(1e308).hex()]), "interval_losses"),
    "a loss that is none": (_progress(interval_losses=["nan"]), "interval_losses"),
    "too many losses": (_progress(interval_losses=["0x0.0p+0"] * 40), "interval_losses"),
    "validated": (_progress(validated=40), "validated"),
    "tokens": (_progress(tokens=1), "tokens is 1"),
    "tokens beyond any count": (_progress(tokens=2**53), "tokens is"),
    "a log": (_progress(log_sizes={"../x": 0}), "log_sizes"),
    "waiting twice": (_progress(waiting=[WAITING, WAITING]), "waiting"),
    "waiting, never tried": (_progress(waiting=[WAITING | {"samples": [[4000, 8]]}]), "waiting"),
    "waiting without samples": (_progress(waiting=[WAITING | {"samples": []}]), "waiting"),
    "waiting for ever": (_progress(waiting=[WAITING | {"due_in": 2}]), "waiting"),
    "tries": (_progress(waiting=[WAITING | {"tries": 40}]), "waiting"),
    "a negative count": (_progress(applied=-1), "applied"),
    "true for 1": (_progress(validated=True), "validated"),
    "1.0 for 1": (_progress(applied=1.0), "applied"),
    "not a number": (_progress(last_applied_scale=math.nan), "last_applied_scale"),
    "no progress": (lambda fields: fields["run"].update(progress={}), "progress|attempts|applied"),
    "a nested configuration": (lambda fields: fields["run"].update(config={"model": {}}), r"run\.config"),
    "no TOML": (lambda fields: fields["run"].update(config="["), "TOML"),
    "a configuration without end": (lambda fields: fields["run"].update(config="x = " + "[" * 99), "than 8 others"),
    "a key without end": (lambda fields: fields["run"].update(config="a." * 9999 + "a = 1"), "more than 8 parts"),
    "a number beyond 64 bits": (_in_config("num_layers = 1\n", f"num_layers = {10**30}\n"), "more than 64 bits"),
    "ranks": (lambda fields: fields["layout"]["axes"].update(dp=2), "layout"),
    "no digest": (lambda fields: fields["run"]["fingerprints"].update({"data.train": "\x1b[2J"}), "fingerprints"),
    "a terminal's escape": (lambda fields: fields.update({"\x1b[2J": 1}), r"\\x1b\[2J"),
}  # fmt: skip
# Changes that may be right for other code than the present one.
REFUSED: dict[str, tuple[Change, str]] = {
    "a scale of 0": (lambda fields: fields["loss_scale"].update(loss_scale=0), r"loss_scale\.loss_scale"),
    "a scale between two powers": (lambda fields: fields["loss_scale"].update(loss_scale=3), "no power of two"),
    "clean steps": (lambda fields: fields["loss_scale"].update(clean_steps=40), "clean_steps"),
    "half a step": (lambda fields: fields["loss_scale"].update(clean_steps=0.5), "clean_steps"),
    "patience": (lambda fields: fields["loss_scale"].update(patience=2), "patience"),
    "a scale's list": (lambda fields: fields["loss_scale"].update(loss_scale=[1.0]), "no power of two"),
    "a state of another rule": (lambda fields: fields["loss_scale"].update(peaks=[1.0]), "loss_scale has"),
    "another rule": (lambda fields: fields.update(loss_scale_rule="TorchLossScale"), "loss_scale_rule"),
    "another model": (_in_config("hidden_size = 32", "hidden_size = 48"), "is no parameter of the model"),
    "a model beyond counting": (_in_config("num_layers = 1\n", f"num_layers = {10**18}\n"), "parameters"),
    "a wrong kind": (_in_config("num_layers = 1\n", "num_layers = '1'\n"), r"model\.num_layers"),
    "a missing key": (_in_config("num_layers = 1\n", ""), r"model\.num_layers"),
    "states": (_in_config('name = "adamw"', 'name = "nag"'), 'optimizer.name: the checkpoint has "nag"'),
    "an alias": (lambda fields: fields["params"][0].update(aliases=["x"]), "params"),
    "an empty parameter": (
        lambda fields: fields["params"].append({"name": "x", "shape": [0], "aliases": []}), "params",
    ),
    "no fingerprint": (lambda fields: fields["run"].update(fingerprints={}), "fingerprints"),
}  # fmt: skip


def _start(config: Config) -> Start:
    return find_start(config, data_fingerprints(config), AllOrNone(Collectives(Axis()), torch.device("cpu")))


@pytest.mark.parametrize("name", WRONG)
def test_what_no_run_can_have_saved_is_refused_and_the_older_one_taken(data, run, caplog, name: str) -> None:
    change, told = WRONG[name]
    newest, older = checkpoints(run / "run/checkpoints")
    edit(newest, change)
    with pytest.raises(DamagedCheckpoint, match=told) as refused:
        read_checkpoint(newest, check_run)
    assert str(refused.value).startswith(str(newest / "manifest.json"))
    assert str(refused.value).isprintable()
    start = _start(_config(data, run))
    assert start.checkpoint is not None
    assert start.checkpoint.path == older
    assert str(newest / "manifest.json") in caplog.text


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_code_of_now_does_not_take_is_refused_and_stays(data, run, name: str) -> None:
    change, told = REFUSED[name]
    newest, older = checkpoints(run / "run/checkpoints")
    edit(newest, change)
    with pytest.raises(ConfigError, match=told) as refused:
        _start(_config(data, run))
    assert name == "states" or str(newest) in str(refused.value)
    assert str(refused.value).replace("\n", " ").isprintable()
    assert checkpoints(run / "run/checkpoints") == [newest, older]


def test_a_field_that_is_there_twice_is_refused(run) -> None:
    newest, _ = checkpoints(run / "run/checkpoints")
    edit(newest, lambda fields: fields["run"]["progress"].update({"cursor@": 40}))
    seal(newest, (newest / "manifest.json").read_bytes().rpartition(b',\n"crc32"')[0].replace(b"cursor@", b"cursor"))
    with pytest.raises(DamagedCheckpoint, match="cursor: the field is there twice"):
        read_checkpoint(newest, check_run)


def test_keys_of_a_later_version_are_told_and_no_damage(data, run, tmp_path) -> None:
    newest, _ = checkpoints(run / "run/checkpoints")
    edit(newest, _in_config("[training]\n", "[training]\nlater = 1\n"))
    start = _start(_config(data, run))
    assert start.checkpoint is not None
    assert start.checkpoint.path == newest
    assert "changed since: training.later: 1 -> not set" in start.lines


@pytest.mark.parametrize("command", ["ls", "verify", "diff", "export"])
def test_every_command_says_so_in_a_line(run, capsys, command: str) -> None:
    newest, older = checkpoints(run / "run/checkpoints")
    edit(newest, _progress(cursor=0))
    more = {"diff": [str(older)], "export": ["--to", "dcp", str(run / "out")]}.get(command, [])
    assert main(["checkpoint", command, str(newest.parent if command == "ls" else newest), *more]) == (command != "ls")
    printed = "".join(capsys.readouterr())
    (line,) = (line for line in printed.splitlines() if "cursor is 0" in line)
    assert newest.name in line
    assert "Traceback" not in printed


@pytest.mark.parametrize("arguments", [["generate"], ["evaluate"], ["export", "--to", "hf", "out"]], ids=lambda a: a[0])
def test_nor_is_its_model_taken(run, tmp_path, monkeypatch, capsys, arguments: list[str]) -> None:
    monkeypatch.chdir(tmp_path)
    newest, _ = checkpoints(run / "run/checkpoints")
    edit(newest, _progress(cursor=0))
    assert main([arguments[0], str(run / "run"), *arguments[1:]]) == 1
    told = capsys.readouterr().err
    assert f"{newest / 'manifest.json'}: cursor is 0" in told
    assert "Traceback" not in told
    assert not (tmp_path / "out").exists()


def test_what_runs_of_every_rule_save_is_accepted(data, tmp_path) -> None:
    for loss_scale in SCALES if FULL else SCALES[1:2]:
        _interrupted(_config(data, tmp_path / loss_scale, loss_scale), 6)
        saved = checkpoints(tmp_path / loss_scale / "run/checkpoints")
        assert len(saved) == 2
        for path in saved:
            read_checkpoint(path, check_run)


POOL = (
    True, False, None, 0, 1, -1, 0.5, 1.0, 39, 2**31, 2**53, 2**53 + 1, 2**63, 10**400, 1e308, math.nan, math.inf, "",
    "1", "zz", "\x1b[2J", "x" * 100_000, "../x", [], {}, [0], [[0, 1]], {"a": 1}, "0x1.8p+1", "nan",
)  # fmt: skip


def _paths(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value below the root."""
    children = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, child in children:
        yield (*path, key)
        yield from _paths(child, (*path, key))


def _at(node: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        node = node[key]
    return node


def _mutate(fields: dict[str, Any], rng: random.Random) -> str:
    """Change one value, seldom two. Return a description."""
    paths = list(_paths(fields))
    # The few fields of the run change as often as the many of parameters and files.
    own = [path for path in paths if path[0] not in ("params", "files", "layout")]
    path = rng.choice(own if rng.random() < 0.8 else paths)
    above, key, value = _at(fields, path[:-1]), path[-1], _at(fields, path)
    kind = rng.choice(("kind", "nudge", "swap", "missing", "extra", "twice", "nested", "line"))
    match kind:
        case "nudge" if isinstance(value, int | float) and abs(value) < 2**64:
            above[key] = rng.choice((value + 1, value - 1, value * 2, value / 2, -value, value * 10**6, float(value)))
        case "swap":
            other = rng.choice(own)
            if other[: len(path)] != path and path[: len(other)] != other:
                above[key] = _at(fields, other)
                _at(fields, other[:-1])[other[-1]] = value
        case "missing":
            del above[key]
        case "extra" if isinstance(value, list):
            value.append(rng.choice(POOL))
        case "extra" if isinstance(value, dict):
            value["extra"] = rng.choice(POOL)
        case "twice" if isinstance(above, dict):
            above[f"{key}@@"] = rng.choice(POOL)
        case "twice":
            above.append(value)
        case "nested":
            for _ in range(rng.choice((1, 2, 300))):
                value = rng.choice(([value], {"a": value}))
            above[key] = value
        case "line" if isinstance(fields.get("run"), dict) and isinstance(fields["run"].get("config"), str):
            lines = fields["run"]["config"].splitlines() or [""]
            place = rng.randrange(len(lines))
            name, _, text = lines[place].partition(" = ")
            lines[place] = rng.choice(
                ("", f"{name} = -1", f"{name} = 0", f"{name} = nan", f"{name} = 1e400", f"{name} = {10**30}",
                 f"[{name}]", f"{name} = {{{name} = {text}}}", f"{lines[place]}\n{lines[place]}",
                 f"{name} = '\x1b'", f"{name}.a = 1")
            )  # fmt: skip
            fields["run"]["config"] = "\n".join(lines)
        case _:
            above[key] = rng.choice(POOL)
    return f"{kind} at {path}"


def _refusal(kind: type[ValueError] | tuple[type[ValueError], ...], work: Callable[[], object]) -> str | None:
    try:
        work()
    except kind as error:
        return str(error)
    return None


def _trains_on(checkpoint: Path, data: Path, folder: Path) -> None:
    """Check that two steps from the checkpoint give finite numbers, or that its configuration is refused in words."""
    manifest = read_manifest(checkpoint / "manifest.json")
    config = _config(data, folder, steps=manifest.applied_updates + 2, resume=str(checkpoint))
    refusal = _refusal(ConfigError, lambda: run_on_ranks(config))
    if refusal is not None:
        assert refusal.replace("\n", " ").isprintable()
        return
    (newest, *_) = checkpoints(folder / "run/checkpoints")
    after = read_checkpoint(newest, check_run)
    assert after.manifest.applied_updates == manifest.applied_updates + 2
    rows = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    losses = [row["train/loss"] for row in rows if "train/loss" in row]
    assert losses
    assert all(math.isfinite(loss) for loss in losses)


@pytest.mark.uncounted
def test_mutants_are_refused_or_train_on(data, run, tmp_path) -> None:
    rng = random.Random(0)
    newest, _ = checkpoints(run / "run/checkpoints")
    intact = (newest / "manifest.json").read_bytes()
    read_checkpoint(newest, check_run)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused = trained = 0
    for number in range(MUTANTS):
        (newest / "manifest.json").write_bytes(intact)
        fields = json.loads(intact)
        del fields["crc32"]
        done = [_mutate(fields, rng) for _ in range(rng.choice((1, 1, 1, 2)))]
        seal(newest, json.dumps(fields).replace('@@"', '"').removesuffix("}").encode())
        begun_s = time.process_time()
        refusal = _refusal((DamagedCheckpoint, ConfigError), lambda: read_on_all(newest, alone(), check_run))
        assert time.process_time() - begun_s < LONGEST_S, done
        assert 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) < MOST_BYTES, done
        if refusal is not None:
            assert refusal.replace("\n", " ").isprintable(), done
            refused += 1
        elif trained < TRAINED:
            _trains_on(newest, data, tmp_path / f"mutant {number}")
            trained += 1
    assert refused > MUTANTS // 2
    assert trained

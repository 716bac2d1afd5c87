"""FP16 and FP32 jobs reach the same loss; a job leaves the files that it should, and its log says how many bytes a rank
holds; a key reported as unread changes no bit. A start reports progress of everything that it draws or loads. A
deterministic job sets torch's deterministic mode.
"""

import json
import math
import re
import shutil
import threading
from collections import Counter

import pytest
import torch
from safetensors.torch import load_file

from megamix.base import constants
from megamix.base.machine import cpu_name, num_cores
from megamix.checkpoint import load
from megamix.checkpoint.all_or_none import AllOrNone
from megamix.cli.verbs import main
from megamix.config import ConfigError, load_config
from megamix.config.unread import READ_WHERE, drop_unread
from megamix.launch.exit_status import NoAnswerError, PreemptedError, WrongDataError
from megamix.log.history import read_history
from megamix.log.metrics import TAGS, is_overflow
from megamix.log.report.plot import figures
from megamix.mixed_precision.engine import ShardedEngine
from megamix.model.family import parameter_count
from megamix.parallel import build
from megamix.train import job, ranks, results, run
from megamix.train import main as train_main
from megamix.train.engine import build_training
from megamix.train.main import run_job
from megamix.train.resume import Resume
from tests.builders import BRANCHING, VOCAB, run_on_ranks, tiny_job, write_data
from tests.config.test_unread import CASES
from tests.conftest import FULL
from tests.train.recorded import run_recorded


def _rows(folder):
    return [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]


def _losses(folder):
    return {row["step"]: row["train/loss"] for row in _rows(folder) if "train/loss" in row}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    write_data(folder, tokenizer=True)
    return folder


@pytest.fixture(scope="module")
def finished(tmp_path_factory, data):
    """Run a job of 20 steps with everything switched on, in this process, and return its folder."""
    folder = tmp_path_factory.mktemp("job")
    config = tiny_job(
        folder,
        tokens=data,
        vocab_size=280,
        tokenizer=str(data / "tokenizer.json"),
        loss_scale={"init_scale": 2.0**24},  # its default
        sample_prompt="class ",
        steps=20,
        start_step=3,
        num_steps=2,
    )
    run_job(config)
    return folder


def test_every_row_says_when_it_was_written_and_how_many_tokens_were_trained_on(finished):
    rows = _rows(finished)
    # An overflow's row has the number of the update that it is on the way to.
    assert [row["train/tokens"] for row in rows] == [(row["step"] - is_overflow(row)) * 8 * 32 for row in rows]
    assert any(is_overflow(row) for row in rows)
    times = [row[TAGS["time"]] for row in rows]
    assert times == sorted(times)
    assert [row["step"] for row in rows if "valid/loss" in row] == [5, 10, 15, 20]


def test_what_is_called_unread_changes_no_bit(tmp_path, data):
    """No configuration can set such a key, so all those that one job can have are set behind its back."""
    config = tiny_job(
        tmp_path,
        tokens=data,
        valid=None,
        decay_style="constant",
        on_overflow="skip",
        loss_scale={"rule": "static", "init_scale": 2.0**10},
        steps=8,
        eval_interval=0,
        save_interval=0,
    )
    tree = config.model_dump()
    keys = {key for key in READ_WHERE if key.count(".") == 1}  # no table within a section is looked at
    keys -= {"training.steps", "lr_schedule.warmup_steps"}  # a run that is as long as its tokens leaves these unread
    for key in keys:
        section, _, name = key.partition(".")
        tree[section][name] = CASES[key][0]
    unread = [item for item in drop_unread(tree)[1] if item.key.count(".") == 1]
    assert {item.key for item in unread} == keys
    ends = []
    for items in ([], unread):
        sections = dict(config)
        for item in items:
            section, _, key = item.key.partition(".")
            sections[section] = sections[section].model_copy(update={key: item.value})
        run_recorded(config.model_copy(update=sections), frozenset([1]))
        ends.append([(tmp_path / "run" / name).read_bytes() for name in ("weights.safetensors", "config.toml")])
        shutil.rmtree(tmp_path / "run")
    assert ends[0] == ends[1]


def test_a_job_logs_the_first_step_every_interval_and_the_last(finished):
    losses = _losses(finished)
    assert list(losses) == [1, 4, 8, 12, 16, 20]
    assert losses[1] == pytest.approx(math.log(280), abs=0.3)
    assert losses[20] < losses[1] - 0.5
    last = [row for row in _rows(finished) if "train/loss" in row][-1]
    assert last.keys() == {"step", *TAGS.values()} - {TAGS["valid_loss"], TAGS["average_loss"], TAGS["resumed"]}
    names = ("data", "forward_backward", "reduce_scatter", "update", "all_gather")
    shares = [last[TAGS[f"{name}_share"]] for name in names]
    assert all(share >= 0 for share in shares)
    assert 0.3 < sum(shares) <= 1.001
    assert last[TAGS["mfu"]] is None  # no published peak of this device is known
    assert last[TAGS["tokens_per_s"]] > 0
    assert last[TAGS["eta_s"]] == 0


def test_weights_are_fp32_without_doubles_and_generate_reads_them(finished, capsys):
    weights = load_file(finished / "run/weights.safetensors")
    assert all(tensor.dtype == torch.float32 for tensor in weights.values())
    assert "embedding.weight" in weights
    assert "head.weight" not in weights  # tied
    args = ["generate", str(finished / "run"), "--prompt", "def ", "--max-new-tokens", "8"]
    assert main(args) == 0
    first = capsys.readouterr().out
    assert first.startswith("def ")
    assert main(args) == 0
    assert capsys.readouterr().out == first  # the same seed
    assert (finished / "run/sample.txt").read_text().startswith("class ")  # metrics.sample_prompt


def test_a_job_leaves_its_configuration_its_start_and_a_trace_and_nothing_unfinished(finished):
    config = load_config(finished / "run/config.toml")
    assert (config.training.steps, config.precision.dtype) == (20, "fp16")
    start = json.loads((finished / "run/journal.jsonl").read_text().splitlines()[1])
    weights = load_file(finished / "run/weights.safetensors")
    assert (start["ranks"], start["parameters"]) == (1, sum(tensor.numel() for tensor in weights.values()))
    assert start["machine"] == f"{num_cores()} cores of {cpu_name()}"
    assert re.fullmatch(rf"megamix \S+, torch {re.escape(torch.__version__)}, Python 3\.\S+", start["versions"])
    trace = json.loads((finished / "run/trace_rank0.json").read_text())
    assert any("step" in str(event.get("name", "")) or event.get("cat") == "cpu_op" for event in trace["traceEvents"])
    assert not [*(finished / "run").glob("*.partial")]


def test_a_sample_of_white_space_is_a_line_and_no_file(tmp_path, data, monkeypatch, capsys):
    monkeypatch.setattr(results, "sample_text", lambda *arguments: " \n\n  ")
    run_job(tiny_job(tmp_path, tokens=data, vocab_size=280, tokenizer=str(data / "tokenizer.json"), steps=2))
    assert "no sample of text: the model writes nothing but white space" in capsys.readouterr().out
    assert not (tmp_path / "run/sample.txt").exists()


@pytest.mark.parametrize("shard", ["states", "parameters"])
def test_a_profile_on_two_ranks_ends_with_its_gathers_landed(run_ranks, tmp_path, data, shard):
    config = tiny_job(tmp_path, tokens=data, start_step=2, num_steps=3, shard=shard, num_layers=3, steps=6)
    losses = run_ranks(run_on_ranks, 2, config)
    assert losses[0] == losses[1]
    assert {path.name for path in (tmp_path / "run").glob("trace_*")} == {"trace_rank0.json", "trace_rank1.json"}
    rows = [row for row in _rows(tmp_path) if "communication/bucket" in row]
    sent = {}
    for kind in ("reduce_scatter", "all_gather"):
        of_kind = [row for row in rows if f"communication/{kind}/landed_s" in row]
        sent[kind] = Counter((row["communication/attempt"], row["communication/bucket"]) for row in of_kind)
        assert all(
            0 < row[f"communication/{kind}/launched_s"] <= row[f"communication/{kind}/landed_s"] for row in of_kind
        )
    attempts = [(attempt, bucket) for attempt in (2, 3, 4) for bucket in range(len(sent["reduce_scatter"]) // 3)]
    assert sent["reduce_scatter"] == Counter(attempts)
    assert [*sent["all_gather"]] == attempts
    # A unit travels for forward and for backward of two micro-batches. The last two units of a forward, and parameters
    # outside of units, stay for its backward.
    assert {*sent["all_gather"].values()} == ({1} if shard == "states" else {2, 4})
    assert "communication" in figures(read_history(tmp_path / "run"))


def test_a_loss_scale_of_a_bf16_run_is_logged(tmp_path, data):
    run_job(tiny_job(tmp_path, tokens=data, dtype="bf16", loss_scale={"rule": "static", "init_scale": 64.0}, steps=4))
    assert [row["optim/loss_scale"] for row in _rows(tmp_path) if "train/loss" in row] == [64.0] * 2


def test_fp16_and_fp32_reach_the_same_loss_near_the_entropy_of_the_data(run_ranks, tmp_path, data):
    steps, batch = (400, 32) if FULL else (60, 16)
    size = {"steps": steps, "global_batch_size": batch, "micro_batch_size": batch // 2, "eval_interval": 0}
    fp16, fp32 = (
        run_ranks(run_on_ranks, 2, tiny_job(tmp_path / dtype, tokens=data, dtype=dtype, **size))
        for dtype in ("fp16", "fp32")
    )
    assert fp16[0] == fp16[1]
    assert abs(fp16[0] - fp32[0]) < 0.05
    assert math.log(BRANCHING) < fp16[0] < math.log(VOCAB) - 1.5


def _described(config):
    engine, numel = build_training(config, torch.device("cpu")).engine, parameter_count(config.model)
    return job._describe(engine, numel, config.pace)


@pytest.mark.parametrize(("shard", "kept"), [("states", 4), ("gradients", 2), ("parameters", 0)])
def test_the_log_says_what_a_rank_holds(run_ranks, tmp_path, shard, kept):
    """Two bytes an element of half parameters and of gradients, where they are kept, and a half of masters' and states'
    12.
    """
    config = tiny_job(tmp_path, hidden_size=128, shard=shard)
    for said in run_ranks(_described, 2, config):
        (mib,) = re.findall(r"([\d.]+) MiB a rank", said)
        bound = 0.06  # 0.05 of rounding, and the padding
        assert float(mib) == pytest.approx(parameter_count(config.model) * (kept + 12 / 2) / 2**20, abs=bound)
        assert said.endswith("accumulation 2" + f' | shard = "{shard}"' * (shard != "states"))


def test_a_start_moves_with_each_parameter_that_it_draws_and_each_piece_that_it_loads(tmp_path, data, monkeypatch):
    seen = []

    class Watched(run.Run):
        def __init__(self, *fields):
            super().__init__(*fields)
            Watched.place = self._position

    def noting(drawn):
        def draw(*arguments, **settings):
            fill = drawn(*arguments, **settings)
            return lambda *where: (seen.append(Watched.place()), fill(*where))

        return draw

    def chunks(*arguments):
        for chunk in verified_chunks(*arguments):
            seen.append(Watched.place())
            yield chunk

    def apart(*arguments):
        watched.append("watchdog" in {thread.name for thread in threading.enumerate()})
        patient.append(connect(*arguments))
        return patient[-1]

    def load_by(*arguments):
        assert arguments[2] is patient[-1]  # a rank that loads fast waits for a slow one as long as that one moves
        return load_into(*arguments)

    watched = []
    patient = []
    connect, verified_chunks, load_into = AllOrNone.apart, load.verified_chunks, Resume.load_into
    monkeypatch.setattr(Resume, "load_into", load_by)
    monkeypatch.setattr(AllOrNone, "apart", apart)
    monkeypatch.setattr(train_main, "Run", Watched)
    monkeypatch.setattr(build, "drawn", noting(build.drawn))
    monkeypatch.setattr(load, "verified_chunks", chunks)
    monkeypatch.setattr(constants, "READ_AHEAD", 1 << 16)
    for steps in (1, 2):
        run_job(tiny_job(tmp_path, tokens=data, steps=steps, eval_interval=0, warmup_steps=0))
        assert len({*seen}) == len(seen) > 4
        assert {place.doing for place in seen} == {"the start"}
        seen.clear()
    assert watched == [True, True]


def test_a_deterministic_job_asks_torch_for_it_and_on_a_cpu_changes_no_bit(tmp_path, data, monkeypatch):
    asked, weights, step = [], [], ShardedEngine.step

    def noted(engine):
        asked.append(torch.are_deterministic_algorithms_enabled())
        return step(engine)

    monkeypatch.setattr(ShardedEngine, "step", noted)
    try:
        for deterministic in (False, True):
            folder = tmp_path / str(deterministic)
            short = {"steps": 3, "eval_interval": 0, "warmup_steps": 0}
            run_job(tiny_job(folder, tokens=data, deterministic=deterministic, **short))
            weights.append((folder / "run/weights.safetensors").read_bytes())
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = True
    assert asked == [False] * 3 + [True] * 3
    assert weights[0] == weights[1]


@pytest.mark.parametrize(
    ("error", "alike"),
    [
        (None, True), (ConfigError(["training.seed: differs"], "job"), True), (PreemptedError(), True),
        (NoAnswerError("rank 1 is silent"), False), (RuntimeError("of this rank alone"), False),
        (WrongDataError("which one rank has read"), False),
    ],
)  # fmt: skip
def test_groups_are_left_where_all_ranks_leave(monkeypatch, error, alike):
    left = []
    monkeypatch.setattr(ranks, "leave_ranks", lambda *, alike: left.append(alike))
    ranks._leave_ranks(type(error), error, None)
    assert left == [alike]

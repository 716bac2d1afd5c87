"""`megamix bench` measures a machine's simulated GPUs where it has some: a line of JSON a side and round, with MFU and
peak memory of the card; a bench of the host is refused there by name.
"""

import json
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from megamix.cli.verbs import main
from megamix.model import layers
from megamix.tools.bench import benches, ranks
from megamix.tools.bench.sides import Ours, plain
from tests.gpu.pools import processes_with_gpus
from tests.tools.bench.tiny import WORK, fork_ranks

H100 = "NVIDIA H100 80GB HBM3"


@pytest.fixture
def a_card(gpu_ranks, monkeypatch):
    """Give this machine one simulated GPU."""
    known = {
        "is_available": True, "device_count": 1, "get_device_name": H100, "is_initialized": False,
        "is_bf16_supported": True, "get_device_properties": SimpleNamespace(total_memory=80 << 30),
    }  # fmt: skip
    for name, answer in known.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer, **__: answer)
    monkeypatch.setattr(benches, "SIZES", dict.fromkeys(("12M", "124M", "1.3B"), WORK))
    monkeypatch.setattr(benches, "set_torch_environment", lambda ranks: None)
    fork_ranks(monkeypatch)
    with processes_with_gpus():
        yield


def _bench(capsys, tmp_path, *flags):
    output = ["--output", str(tmp_path / "lines.jsonl")]
    assert main(["bench", *flags, "--rounds", "2", "--json", *output]) == 0
    printed = capsys.readouterr().out
    assert printed == (tmp_path / "lines.jsonl").read_text()
    return [json.loads(line) for line in printed.splitlines()]


def _fails(work):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")


@pytest.mark.usefixtures("a_card")
def test_sides_take_turns_on_the_card(capsys, tmp_path, monkeypatch):
    monkeypatch.setitem(benches.SIDES, "fsdp2", _fails)
    begin, *rounds, last = _bench(capsys, tmp_path, "train", "--sides", "ours,plain,muon,fsdp2")
    assert (begin["machine"]["device"], begin["machine"]["cards"]) == (H100, 1)
    assert begin["settings"]["device"] == "cuda"
    told = [(line["side"], line["round"]) for line in rounds if "error" not in line]
    assert told == [("ours", 1), ("plain", 1), ("muon", 1), ("plain", 2), ("muon", 2), ("ours", 2)]
    for line in rounds:
        if "error" not in line:
            assert line["tokens_per_s"] > 0
            assert 0 < line["mfu"] < 1
            assert 1e-5 < line["peak_gib"] < 1
    (failed,) = [line for line in rounds if "error" in line]
    assert (failed["side"], failed["error"]) == (
        "fsdp2",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB",
    )
    assert [*last["raw"]] == ["ours", "plain", "muon"]
    assert last["notes"][0] == "fsdp2: failed, see above"
    assert last["columns"][-2:] == ["MFU %", "peak GiB"]


@pytest.mark.usefixtures("a_card")
def test_a_side_that_fails_alone_leaves_the_others_their_turns(capsys, tmp_path, monkeypatch):
    monkeypatch.setitem(benches.SIDES, "fsdp2", _fails)
    monkeypatch.setattr(benches, "sides_at_once", lambda *_: 1)  # as on a card that holds the state of one
    _, *rounds, last = _bench(capsys, tmp_path, "train", "--sides", "fsdp2,ours")
    assert [line["side"] for line in rounds] == ["fsdp2", "ours", "ours"]
    assert [*last["raw"]] == ["ours"]


@pytest.mark.usefixtures("a_card")
def test_the_update_is_of_the_card(capsys, tmp_path):
    begin, one, two, last = _bench(capsys, tmp_path, "update")
    assert begin["settings"]["device"] == "cuda"
    assert [one["round"], two["round"]] == [1, 2]
    assert {"copy", "update, no compiler"} <= {*one["seconds"]}
    assert [*last["raw"]] == ["bf16, 1 thread(s)"]


@pytest.mark.usefixtures("a_card")
def test_what_measures_the_host_is_refused_by_name(capsys):
    for what in ("step", "host"):
        assert main(["bench", what, "--device", "cuda"]) == 2
        said = f"--device: got cuda, but {what} is not measured on 1 GPU(s); name one of update, train, startup"
        assert said in capsys.readouterr().err
    assert main(["bench", "--sides", "ours,theirs"]) == 2
    assert "--sides: got theirs, known are ours, gradients, parameters, muon, fp8_rowwise" in capsys.readouterr().err
    assert main(["bench", "update", "--size", "1.3B"]) == 2
    assert "--size: only whole steps have it" in capsys.readouterr().err


def _sides_of_an_old_card():
    """Train ours and plain torch on a card without BF16, whose weights nobody draws on the host."""
    with (
        mock.patch.object(torch.cuda, "is_bf16_supported", lambda including_emulation: False),
        mock.patch.object(layers, "draw_normal", None),
    ):
        trained = []
        for build in (Ours, plain):
            rank = ranks.TrainRank(ranks.Side("", build), replace(WORK, device="cuda"))
            losses = rank.losses(3)
            side = rank.engine
            trained.append((side.engine.buckets[0].params.dtype if build is Ours else side._dtype, losses))
        assert side._scaler.is_enabled()
        return trained


def test_a_card_without_bf16_trains_in_fp16(gpu_ranks):
    (((ours, losses), (theirs, others)),) = gpu_ranks(_sides_of_an_old_card, 1)
    assert ours == theirs == torch.float16
    assert losses == pytest.approx(others, abs=2e-2)
    assert losses[2] < losses[0]


def test_a_smaller_card_gets_less_work():
    small, large = benches.SIZES["124M"], replace(benches.SIZES["1.3B"], device="cuda")
    sizes = {}
    for gib in (15, 40, 80, 140):
        work = benches.fitted(large, gib * 2**30)
        sizes[gib] = work.micro_batch_size, work.model.num_layers, benches.sides_at_once(work, gib * 2**30)
    assert sizes == {15: (1, 6, 1), 40: (2, 24, 1), 80: (8, 24, 1), 140: (8, 24, 3)}
    assert benches.fitted(small, 80 * 2**30) == small
    assert benches.fitted(small, 15 * 2**30).micro_batch_size == 16
    assert ranks.Settings().figures([ranks.Turn(1.0, 0, 0, 0, {}, 0)]) == {"tokens_per_s": 2048.0}

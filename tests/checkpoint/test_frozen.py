"""A checkpoint knows the values of the frozen parameters at its save: a load with other values is refused by name on
all ranks and sets nothing aside; `frozen=True` saves them once and loads them back.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from megamix import Checkpoints, Precision, ShardedEngine
from megamix.checkpoint.folder import checkpoints
from tests.distributed.models import TinyModel, make_model
from tests.engines import make_engine


def _engine(seed: int = 0, dtype: torch.dtype = torch.bfloat16, change: Callable[[TinyModel], object] | None = None):
    """Return an engine with a frozen table, drawn by the seed, and a frozen norm inside a wrapped block."""
    model = make_model(tied=False)
    torch.manual_seed(seed)
    nn.init.normal_(model.embedding.weight)
    model.embedding.requires_grad_(False)
    model.blocks[0] = checkpoint_wrapper(model.blocks[0]).requires_grad_(False)
    model.register_parameter("index", nn.Parameter(torch.tensor(seed), requires_grad=False))
    if change is not None:
        change(model)
    return make_engine(model, precision=Precision(dtype))


def _table(engine: ShardedEngine) -> Tensor:
    return engine.module.embedding.weight.detach().clone()


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


OTHER = (
    r"was saved beside other frozen parameters than the model has, .* They differ in index, embedding.weight.* "
    r"Give the model the same frozen parameters, .* Checkpoints\(\.\.\., frozen=True\)"
)


def test_other_frozen_values_are_refused_by_name_and_nothing_is_set_aside(tmp_path: Path) -> None:
    Checkpoints(_engine(), tmp_path).save({})
    engine = _engine(seed=1)
    before = engine.full_weights()
    for takes in (False, True):  # nobody has saved the values
        with pytest.raises(ValueError, match=OTHER):
            Checkpoints(engine, tmp_path, frozen=takes).load()
    assert all(torch.equal(weight, before[name]) for name, weight in engine.full_weights().items())
    assert _names(tmp_path) == ["step_00000000"]
    assert Checkpoints(_engine(), tmp_path).load() == {}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda model: model.register_parameter("more", nn.Parameter(torch.ones(2), False)), "They differ in more"),
        (lambda model: delattr(model, "index"), "They differ in index"),
        (
            lambda model: setattr(model.embedding, "weight", nn.Parameter(_flat(model), False)),
            "They differ in embedding.weight",
        ),
    ],
)
def test_what_was_not_frozen_there_or_has_another_shape_is_named(change, message: str, tmp_path: Path) -> None:
    Checkpoints(_engine(), tmp_path).save({})
    with pytest.raises(ValueError, match=message):
        Checkpoints(_engine(change=change), tmp_path).load()


def _flat(model: TinyModel) -> nn.Parameter:
    return nn.Parameter(model.embedding.weight.detach().reshape(1, -1), requires_grad=False)


def test_values_that_are_written_after_the_build_count(tmp_path: Path) -> None:
    engine, source = _engine(seed=1), _engine()
    Checkpoints(source, tmp_path).save({})
    checkpoints = Checkpoints(engine, tmp_path)
    with pytest.raises(ValueError, match="embedding.weight"):
        checkpoints.load()
    engine.load_weights(source.full_weights())
    assert checkpoints.load() == {}


def test_frozen_values_are_saved_once_and_loaded_back(tmp_path: Path) -> None:
    engine = _engine()
    saving = Checkpoints(engine, tmp_path, frozen=True)
    saving.save({"step": 0})
    (values,) = tmp_path.glob("frozen_*/values.safetensors")
    before, named = values.stat(), _names(tmp_path)
    assert all("embedding" not in path.name for path in checkpoints(tmp_path)[0].iterdir())
    saving.save({"step": 1}, beside=True)
    saving.wait()
    after = values.stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert _names(tmp_path) == [*named, "step_00000000.1"]
    other = _engine(seed=1)
    with pytest.raises(ValueError, match=OTHER):
        Checkpoints(other, tmp_path).load()
    assert Checkpoints(other, tmp_path, frozen=True).load() == {"step": 1}
    assert torch.equal(_table(other), _table(engine))
    assert int(other.module.index) == 0
    second = _engine(seed=2)  # other values than the folder keeps
    with pytest.raises(ValueError, match="embedding.weight"):
        Checkpoints(second, tmp_path).load()
    going_on = Checkpoints(second, tmp_path, frozen=True)
    going_on.load()
    assert going_on.load() == {"step": 1}


def test_damaged_values_are_refused_and_the_checkpoint_stays(tmp_path: Path) -> None:
    Checkpoints(_engine(), tmp_path, frozen=True).save({})
    (values,) = tmp_path.glob("frozen_*/values.safetensors")
    content = bytearray(values.read_bytes())
    length = int.from_bytes(content[:8], "little")
    content[8 + length + json.loads(content[8:][:length])["embedding.weight"]["data_offsets"][0]] ^= 1
    values.write_bytes(content)
    engine = _engine(seed=1)
    table, named = _table(engine), _names(tmp_path)
    with pytest.raises(OSError, match=r"rank 0: .*values\.safetensors: embedding\.weight is not what was saved"):
        Checkpoints(engine, tmp_path, frozen=True).load()
    assert torch.equal(_table(engine), table)
    assert _names(tmp_path) == named


def test_another_dtype_is_told_and_loaded_by_values(tmp_path: Path, caplog) -> None:
    engine = _engine(dtype=torch.float32)
    Checkpoints(engine, tmp_path, frozen=True).save({})
    assert Checkpoints(_engine(), tmp_path).load() == {}
    assert "frozen parameters cannot be compared" in caplog.text
    other = _engine(seed=1)
    Checkpoints(other, tmp_path, frozen=True).load()
    assert torch.equal(_table(other), _table(engine).bfloat16())


def _of_one_rank(folder: Path) -> list[str]:
    """Build with other values on the second rank. The first rank's values count: a build gives them to all ranks."""
    rank = torch.distributed.get_rank()
    Checkpoints(_engine(), folder, frozen=True).save({})
    answers = []
    for frozen in (False, True):
        engine = _engine(seed=5 + rank)
        try:
            answers.append(str(Checkpoints(engine, folder, frozen=frozen).load()))
        except ValueError as error:
            answers.append(str(error))
    return [*answers, str(float(_table(engine).double().sum()))]


def test_all_ranks_refuse_and_load_alike(run_ranks, tmp_path: Path) -> None:
    first, second = run_ranks(_of_one_rank, 2, tmp_path)
    assert first == second
    assert "They differ in index, embedding.weight" in first[0]
    assert first[1:] == ["{}", str(float(_table(_engine()).double().sum()))]


def test_a_teacher_that_moves_past_torch_s_counters_is_saved_as_it_is(tmp_path: Path) -> None:
    engine = _engine()
    saving = Checkpoints(engine, tmp_path, frozen=True)
    for number in range(5):
        engine.module.embedding.weight.data.mul_(0.5)
        saving.save({"number": number})
    assert len([*tmp_path.glob("frozen_*")]) == 3  # those of the older checkpoints, and of the last
    other = _engine(seed=1)
    assert Checkpoints(other, tmp_path, frozen=True).load() == {"number": 4}
    assert torch.equal(_table(other), _table(engine))


def test_a_transposed_mask_with_infinities_is_saved_and_loaded(tmp_path: Path) -> None:
    def with_mask(model: TinyModel) -> None:
        mask = torch.zeros(3, 4).fill_diagonal_(-torch.inf)
        model.register_parameter("mask", nn.Parameter(mask.t(), requires_grad=False))

    engine, other = _engine(change=with_mask), _engine(seed=1, change=with_mask)
    engine.load_weights(engine.full_weights())
    Checkpoints(engine, tmp_path, frozen=True).save({})
    assert Checkpoints(other, tmp_path, frozen=True).load() == {}
    assert torch.equal(other.module.mask, engine.module.mask)

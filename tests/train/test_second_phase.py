"""A new run from another run's checkpoint keeps every bit of what fits, on any layout: weights, moments and averages,
also where a vocabulary has got rows. New rows and parameters that begin anew are those that a run draws at first. The
first loss is that of the same change made by hand to a model in one process. What is kept and what begins anew is told
before anything runs, and what can be neither is refused. The new run stops and goes on as any other.
"""

import random

import pytest
import torch
from safetensors.torch import load_file

from megamix.checkpoint.boxes import Box
from megamix.checkpoint.folder import checkpoints
from megamix.checkpoint.manifest import AVERAGE, MASTER
from megamix.checkpoint.verify import verify_checkpoint
from megamix.cli.verbs import main
from megamix.config import ConfigError
from megamix.model.family import family_of
from tests.builders import EXPERTS, corpus_of, run_on_ranks, tiny_job
from tests.conftest import FULL
from tests.train.outcome import differences, end_of, metrics_of
from tests.train.recorded import run_recorded

STEPS, ROWS, MORE = 3, 64, 96  # updates of the first run; sizes of the vocabulary
TWO = {"size": 2}
DENSE = {"1": {}, "dp2": {}, "tp2": {"tensor": TWO}, "pp2": {"pipeline": TWO}, "cp2": {"context": TWO}}
SPARSE = {"1": {}, "dp2": {}, "ep2": {"expert": TWO}, "pp2": {"pipeline": TWO}}
YARN = {"theta": 5e5, "scaling": {"rule": "yarn", "factor": 2.0, "original_seq_len": 16}}
SIDE = "1", "states", "adamw", "bf16"
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


def _side(choose, layouts):
    layout, dtype = choose.choice([*layouts]), choose.choice([*DTYPES])
    shard = choose.choice(("states", "gradients", "parameters")) if layout in ("1", "dp2") else "states"
    return layout, shard, choose.choice(("adamw", "nag", "muon")), dtype


def _pairs():
    """Return drawn pairs, before and now: layout, shard, optimizer, dtype. The first: two ranks along dp, then tp."""
    choose = random.Random(61)
    pairs = [(("dp2", "states", "adamw", "bf16"), ("tp2", "states", "adamw", "fp32"))]
    for number in range(1, 12):
        layouts = SPARSE if number % 3 == 0 else DENSE
        pairs.append((_side(choose, layouts), _side(choose, layouts)))
    return pairs


def _job(folder, data, side, sparse, **settings):
    layout, shard, optimizer, dtype = side
    own = {"steps": STEPS, "seq_len": 16, "vocab_size": ROWS, "eval_interval": 0, "log_interval": 1, "num_layers": 4}
    own |= {"optimizer": {"name": optimizer}, "parallelism": (SPARSE | DENSE)[layout] | {"shard": shard}}
    own |= {"decay_style": "constant", "average": {"decay": 0.5}, "experts": EXPERTS if sparse else None}
    scale = {"init_scale": 2.0**10} if dtype == "fp16" else {}
    return tiny_job(folder, tokens=data, precision={"dtype": dtype, "loss_scale": scale}, **own | settings)


def _ranks(side):
    return 1 if side[0] == "1" else 2


def _newest(folder):
    return verify_checkpoint(checkpoints(folder / "run/checkpoints")[0])


def _tensors(checkpoint):
    """Return every tensor of a checkpoint, by parameter and state."""
    return {
        (name, state): checkpoint.gather(name, state, Box.whole(shape))
        for name, state, shape, _ in checkpoint.manifest.tensors()
    }


def _drawn(config, name, shape):
    """Return a parameter as a run of this configuration draws it."""
    out = torch.empty(shape)
    draw = family_of(config.model).on_meta(config.model).draws(config.training.seed, packed=False)
    draw(out.view(-1), name=name, full_shape=shape, block=[slice(0, size) for size in shape], first=0)
    return out


def _loss_by_hand(config, weights):
    """Return the loss of a run's first batch with these weights, by a plain module in one process."""
    model = family_of(config.model)(config.model)
    model.load_state_dict(weights | {"head.weight": weights.get("head.weight", weights["embedding.weight"])})
    model.to(DTYPES[config.precision.dtype])
    tokens = torch.from_numpy(corpus_of(config).training(config.training.seed).read(range(8)).tokens)
    losses = [model(part[:, :-1], part[:, 1:]) for part in tokens.split(config.training.micro_batch_size)]
    return float(torch.stack(losses).mean().detach())


def _is_new(name):
    return ("blocks.2." in name and "norm" in name) or "blocks.3.feed_forward.down" in name


@pytest.mark.parametrize("number", range(12 if FULL else 4))
def test_what_fits_keeps_its_bits_and_the_first_loss_is_that_of_the_change_by_hand(number, run_ranks, tmp_path, data):
    before, now = _pairs()[number]
    sparse, tied = number % 3 == 0 < number, number % 2 == 0
    if now[0] in ("tp2", "cp2"):
        now = (*now[:3], "fp32")  # in half its sums are rounded otherwise than in one process
    run_ranks(run_on_ranks, _ranks(before), _job(tmp_path / "first", data, before, sparse, tie_embeddings=tied))
    old = _newest(tmp_path / "first")
    change = {"vocab_size": MORE, "seq_len": 32, "rope": YARN, "tie_embeddings": tied, "resume": str(old.path)}
    change["begin_anew"] = ["blocks.2.*norm*", "blocks.3.feed_forward.down*"]
    kept = _job(tmp_path / "kept", data, now, sparse, **change)
    run_ranks(run_on_ranks, _ranks(now), kept)  # no update is left: it loads and saves
    was, new = _tensors(old), _tensors(_newest(tmp_path / "kept"))
    for (name, state), tensor in new.items():
        begins = _drawn(kept, name, tuple(tensor.shape)) if state in (MASTER, AVERAGE) else torch.zeros_like(tensor)
        held = was.get((name, state), tensor[:0])
        want = begins if _is_new(name) else torch.cat([held, begins[len(held) :]])
        assert torch.equal(tensor, want), (name, state)
    assert len(new["embedding.weight", AVERAGE]) == MORE
    # The same change by hand: to the weights that the first run has written.
    weights = load_file(tmp_path / "first/run/weights.safetensors")
    for name, weight in weights.items():
        if _is_new(name):
            weights[name] = _drawn(kept, name, tuple(weight.shape))
        elif name in ("embedding.weight", "head.weight"):
            weights[name] = torch.cat([weight, _drawn(kept, name, (MORE, 32))[ROWS:]])
    run_ranks(run_on_ranks, _ranks(now), kept.with_keys(training={"steps": STEPS + 1}))
    row = metrics_of(tmp_path / "kept")[0]
    assert row["step"] == STEPS + 1
    assert row["train/loss"] == pytest.approx(_loss_by_hand(kept, weights), abs=1e-6)


@pytest.fixture
def first(tmp_path, data):
    """Run a job. Return the path of its checkpoint."""
    run_on_ranks(_job(tmp_path / "first", data, SIDE, sparse=False))
    return checkpoints(tmp_path / "first/run/checkpoints")[0]


def _phase(folder, data, first, **settings):
    """Return a job that begins from a checkpoint and, but for `settings`, is the same."""
    return _job(folder, data, SIDE, **{"sparse": False, "resume": str(first), "steps": STEPS + 4} | settings)


def test_the_data_begin_anew_where_their_order_is_another_one_and_a_kill_changes_nothing(tmp_path, data, first):
    own = {"seq_len": 32, "begin_anew": ["embedding.weight"], "save_interval": 2}
    whole, killed = (_phase(tmp_path / name, data, first, **own) for name in ("whole", "killed"))
    assert run_recorded(whole).samples() == [*range(4 * 8)]
    run_recorded(killed, crash_at=STEPS + 2)
    assert run_recorded(killed).samples() == [*range(8, 4 * 8)]  # from its own checkpoint: nothing begins anew again
    assert differences(end_of(tmp_path / "killed"), end_of(tmp_path / "whole")) == []
    with pytest.raises(
        ConfigError, match="model.num_heads: the checkpoint has 2, the configuration 4; write the former"
    ):
        run_on_ranks(killed.with_keys(model={"num_heads": 4}))  # what began anew is the run's own now
    branch = run_recorded(_phase(tmp_path / "branch", data, first, rope={"theta": 5e5}))
    assert branch.samples() == [*range(3 * 8, 7 * 8)]  # the order is the same: no sample comes twice


def test_the_data_begin_anew_where_they_are_other_data(tmp_path, data, first, capsys):
    for name, settings in (("seed", {"seed": 3}), ("mixture", {"train": [{"markov": 4}]})):
        assert run_recorded(_phase(tmp_path / name, data, first, **settings)).samples() == [*range(4 * 8)]
    said = capsys.readouterr().out
    assert "begins anew: the data, at sample 0, because of training.seed\n" in said
    assert "begins anew: the data, at sample 0, because of data.train\n" in said


def test_a_check_tells_what_is_kept_and_what_begins_anew(tmp_path, data, first, capsys):
    model = {"vocab_size": MORE, "num_layers": 3, "tie_embeddings": False, "begin_anew": ["head.*", "blocks.3.*"]}
    job = _phase(tmp_path / "second", data, first, **model, optimizer={"name": "nag"}, seed=3)
    (tmp_path / "job.toml").write_text(job.text)
    assert main(["train", str(tmp_path / "job.toml"), "--check"]) == 0
    said = [line.strip() for line in capsys.readouterr().out.splitlines()]
    lines = [line for line in said if line.startswith(("tokens ", "kept:", "begins anew:", "left out:"))]
    assert lines == [
        "kept: 29 of 30 parameters, update 3",
        "begins anew: rows 64 to 95 of embedding.weight, drawn by training.seed",
        "begins anew: head.weight, drawn by training.seed",
        "begins anew: at zero, states of the optimizer that the checkpoint lacks",
        "begins anew: the data, at sample 0, because of training.seed",
        "left out: blocks.3.attention_norm.weight, blocks.3.attention.query.weight, blocks.3.attention.key.weight, "
        "blocks.3.attention.value.weight, blocks.3.attention.out.weight, blocks.3.feed_forward_norm.weight, "
        "blocks.3.feed_forward.gate.weight, blocks.3.feed_forward.up.weight and 1 more",
        "tokens        512 in 4 updates of 128 after update 3",
    ]
    assert not (tmp_path / "second/run").exists()
    assert main(["train", str(tmp_path / "job.toml"), "--check", f"training.steps={STEPS}"]) == 0
    assert "so no step is left" in capsys.readouterr().out.partition("\n")[0]


def test_imported_weights_get_rows_too(tmp_path, data, first):
    job = _phase(tmp_path / "second", data, _weights_alone(first), vocab_size=MORE, steps=2)
    assert run_recorded(job).samples() == [*range(2 * 8)]


def _weights_alone(first):
    """Return a checkpoint of the weights alone, as an import and `checkpoint average` write it."""
    target = first.parents[3] / "mean"
    assert main(["checkpoint", "average", str(first), "--output", str(target)]) == 0
    return checkpoints(target / "checkpoints")[0]

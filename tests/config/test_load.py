"""Files, bases and overrides become one checked configuration, which is shown and loads again as the same. A base that
is a folder, a circle, no text or no TOML is refused with one line; any bytes load or are refused; CONFIG may be a pipe.
"""

import os
import random
from operator import attrgetter
from pathlib import Path

import pytest
from pydantic import ValidationError

from megamix.config import Config, ConfigError, DataSource, config_from_dict, load_config
from megamix.config.sections import SECTIONS
from megamix.plugins import Section
from tests.conftest import FULL

CONFIGS = Path(__file__).parents[2] / "configs"
MINIMAL = """
[model]
vocab_size = 64
seq_len = 8
hidden_size = 16
num_layers = 1
num_heads = 2
[data]
train = "tokens/train"
[optimizer]
lr = 1e-3
[training]
steps = 10
micro_batch_size = 2
global_batch_size = 4
[checkpoint]
folder = "runs/x"
"""


def write(folder, name, text):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture
def minimal(tmp_path):
    return write(tmp_path, "a.toml", MINIMAL)


def problems_of(path, *overrides):
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return caught.value.problems


def test_minimal_file_gets_every_default_and_nothing_changes_it(minimal):
    config = load_config(minimal)
    assert config.model.hidden_size == 16
    assert config.model.num_kv_heads is None
    assert dict(config.optimizer.adamw) == {"betas": (0.9, 0.95), "eps": 1e-8, "state_dtype": "fp32"}
    assert config.optimizer.groups == ()
    assert dict(config.precision.loss_scale) == {"rule": "auto"}  # off, in BF16
    assert config.parallelism.overlap is True
    changed = config.with_keys(model={"num_heads": 4}, training={"steps": 20})
    assert (changed.model.num_heads, changed.training.steps) == (4, 20)
    assert (config.model.num_heads, config.training.steps) == (2, 10)
    assert changed.with_keys(model={"num_heads": 2}, training={"steps": 10}) == config
    for section, key in ((config.model, "num_layers"), (config, "model")):
        with pytest.raises(ValidationError):
            setattr(section, key, 3)


@pytest.mark.parametrize(
    ("override", "want"),
    [
        ("optimizer.lr=3e-4", 3e-4),
        ("optimizer.min_lr=0", 0.0),  # a whole number stands for a float
        ("precision.dtype=fp32", "fp32"),
        ('precision.dtype="fp32"', "fp32"),
        ("model.compile=true", True),
        ("precision.loss_scale.rule=headroom", "headroom"),
        ("optimizer.adamw.betas=[0.8, 0.9]", (0.8, 0.9)),
        ("data.train=other/tokens=v2", (DataSource(path="other/tokens=v2"),)),
        (" training.steps = 7 ", 7),
    ],
)
def test_override_is_a_toml_value_or_else_text(minimal, override, want):
    found = attrgetter(override.partition("=")[0].strip())(load_config(minimal, [override]))
    assert (found, type(found)) == (want, type(want))


def test_override_fills_groups_and_the_last_one_wins(minimal):
    groups = 'optimizer.groups=[{pattern = "*.norm.*", lr_factor = 2, weight_decay = 0}]'
    config = load_config(minimal, ["training.steps=20", groups, "training.steps=30"])
    assert config.training.steps == 30
    (group,) = config.optimizer.groups
    assert (group.pattern, group.lr_factor, group.weight_decay) == ("*.norm.*", 2.0, 0.0)


def test_override_cannot_smuggle_in_a_second_key(minimal):
    (problem,) = problems_of(minimal, "metrics.log_interval=3\nsteps = 4")
    assert problem.startswith(r'metrics.log_interval: got "3\nsteps = 4", must be a whole number')


def test_base_holds_where_the_file_is_silent_also_within_tables(tmp_path):
    scaled = "[model.rope.scaling]\nrule = 'llama3'\nfactor = 8.0\nhigh_freq_factor = 2.0\n"
    write(tmp_path, "deep/bottom.toml", MINIMAL + scaled)
    write(tmp_path, "deep/middle.toml", 'base = "bottom.toml"\n[training]\nsteps = 20\n[model]\nnum_layers = 2\n')
    top = 'base = "deep/middle.toml"\n[model]\nnum_layers = 3\n[model.rope.scaling]\nfactor = 32\n'
    top = write(tmp_path, "top.toml", top)
    config = load_config(top, ["model.rope.scaling.original_seq_len=4096"])
    assert (config.model.num_layers, config.training.steps, config.model.hidden_size) == (3, 20, 16)
    scaling = config.model.rope.scaling
    assert (scaling.factor, scaling.high_freq_factor, scaling.original_seq_len) == (32.0, 2.0, 4096)
    (problem,) = problems_of(top, "model.rope.scaling.low_freq_factor=3")
    assert "high_freq_factor: got 2.0, must be greater than low_freq_factor 3" in problem


def test_circle_of_bases_is_named(tmp_path):
    write(tmp_path, "a.toml", 'base = "deep/b.toml"')
    write(tmp_path, "deep/b.toml", 'base = "../a.toml"')
    (problem,) = problems_of(tmp_path / "a.toml")
    assert "files inherit in a circle: " in problem
    assert problem.index("a.toml ->") < problem.index("b.toml ->")
    assert problem.endswith("remove one base")


def test_missing_base_names_both_files_and_the_near_one_or_where_bases_are(tmp_path):
    (problem,) = problems_of(write(tmp_path, "common.toml", 'base = "comon.toml"'))
    assert problem == (
        f"base: got {tmp_path / 'comon.toml'}, named by {tmp_path / 'common.toml'}, there is no such file; "
        f"did you mean {tmp_path / 'common.toml'}?"
    )
    (problem,) = problems_of(write(tmp_path, "b.toml", 'base = "configs/base.toml"'))
    assert problem.endswith(
        "there is no such file; write the path of a TOML file, a base's as seen from its file; megamix's own are in "
        "configs/ of its repository: copy the one you want"
    )


@pytest.mark.parametrize("value", ["3", '""'])
def test_base_must_be_a_path(tmp_path, value):
    (problem,) = problems_of(write(tmp_path, "a.toml", f"base = {value}"))
    assert problem.startswith(f"base: got {value} in ")


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (Path.mkdir, "cannot be read: Is a directory; write the path of a TOML file"),
        (lambda path: path.symlink_to("job.toml"), "files inherit in a circle: "),
        (lambda path: path.write_bytes(b"\xff\xfe"), "cannot be read: it is no text in UTF-8, so no TOML; write the"),
        (lambda path: path.write_text("a = '''"), "is no TOML"),
    ],
)
def test_a_base_that_is_no_configuration_is_refused_in_a_line(tmp_path, make, told):
    """A user who names the wrong file as base."""
    make(tmp_path / "base.toml")
    (problem,) = problems_of(write(tmp_path, "job.toml", 'base = "base.toml"\n'))
    assert told in problem


def test_the_byte_order_mark_of_some_editors_is_no_mistake(minimal):
    config = load_config(minimal)
    minimal.write_bytes(b"\xef\xbb\xbf" + minimal.read_bytes())
    assert load_config(minimal) == config


def test_the_file_itself_may_be_a_pipe():
    """A user of a shell, who writes megamix train <(generate)."""
    readable, writable = os.pipe()
    os.write(writable, MINIMAL.encode())
    os.close(writable)
    assert load_config(f"/dev/fd/{readable}").training.steps == 10
    os.close(readable)


def test_no_change_of_a_file_s_bytes_ends_in_anything_but_lines(tmp_path):
    """Bit rot, and a slip of an editor."""
    whole = (CONFIGS / "base.toml").read_bytes()
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


def test_table_does_not_hide_a_mistake_below_it(tmp_path):
    path = write(tmp_path, "a.toml", f"metrics = 3\n{MINIMAL}")
    (problem,) = problems_of(path, "metrics.log_interval=5")
    assert problem == "metrics: got 3, must be a table; write [metrics] and its keys below it"


# By a cosine, without validation and profile.
UNREAD = {
    *("training.eval_batches", "profiling.start_step", "metrics.sample_prompt"),
    *("lr_schedule.warmup_tokens", "lr_schedule.decay_tokens"),
}


def test_effective_configuration_reads_back_equal(tmp_path):
    strange = {
        "model": {"vocab_size": 64, "seq_len": 8, "hidden_size": 16, "num_layers": 1, "num_heads": 2},
        "data": {"train": 'a "quoted" \\ path\twith ümlaut\x7f'},
        "optimizer": {
            "lr": 1e-3,
            "adamw": {"betas": [0.8, 0.999]},
            "groups": [{"pattern": "*.bias"}, {"pattern": "x", "lr_factor": 0.1, "weight_decay": 0.0}],
        },
        "precision": {"dtype": "fp16", "loss_scale": {"rule": "torch", "max_scale": 2.0**126, "min_scale": 2.0**-126}},
        "training": {"steps": 10, "micro_batch_size": 2, "global_batch_size": 4},
        "parallelism": {"dp_size": 2, "overlap": False},
        "checkpoint": {"folder": "x\ny"},
    }
    config = config_from_dict(strange)
    assert load_config(write(tmp_path, "effective.toml", config.text)) == config


def test_effective_configuration_mentions_every_key_that_is_read_and_first_what_chooses_the_others(minimal):
    config = load_config(minimal)
    text = config.text
    assert text.startswith("plugins = []\n")
    for name in [*SECTIONS, "optimizer.adamw", "precision.loss_scale"]:
        assert f"[{name}]" in text
        for key, value in attrgetter(name)(config):
            line = f"# {key}: not set\n" if value is None else f"{key} = "
            assert (f"\n{line}" in text) == (f"{name}.{key}" not in UNREAD) or isinstance(value, Section)
    for first in ("[model]\nfamily = ", "[optimizer]\nname = ", "[precision.loss_scale]\nrule = "):
        assert first in text


def test_every_shipped_configuration_is_right():
    files = sorted(CONFIGS.glob("*.toml"))
    assert files
    for path in files:
        assert isinstance(load_config(path), Config)


def test_a_run_s_own_configuration_may_list_keys_that_are_gone_at_their_defaults(tmp_path):
    """A user who goes on by a run's config.toml, which an earlier version has written."""
    gone = '[optimizer.nag]\ndampening = 0.0\n[precision.fp8]\nrecipe = "none"\nhalf_first = 0\nhalf_last = 0\n'
    write(tmp_path, "run/metrics.jsonl", "")
    load_config(write(tmp_path, "run/config.toml", MINIMAL + gone))
    told = problems_of(
        write(tmp_path, "job.toml", MINIMAL + gone.replace("none", "rowwise").replace("first = 0", "first = 1"))
    )
    assert any("half_first" in line and 'write but = ["blocks.0.*"]' in line for line in told)

"""Files, bases and overrides become one checked configuration, which is shown and loads again as the same."""

from operator import attrgetter
from pathlib import Path

import pytest
from pydantic import ValidationError

from megamix.config import Config, ConfigError, DataSource, config_from_dict, config_to_toml, load_config
from megamix.config.sections import SECTIONS
from megamix.plugins import Section

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


def problems_of(path, *overrides):
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return caught.value.problems


def test_minimal_file_gets_every_default(tmp_path):
    config = load_config(write(tmp_path, "a.toml", MINIMAL))
    assert config.model.hidden_size == 16
    assert config.model.num_kv_heads is None
    assert dict(config.optimizer.adamw) == {  # type: ignore[attr-defined]
        "betas": (0.9, 0.95), "eps": 1e-8, "state_dtype": "fp32",
    }  # fmt: skip
    assert config.optimizer.groups == ()
    assert dict(config.precision.loss_scale) == {"rule": "auto"}  # off, in BF16
    assert config.parallelism.overlap is True


def test_with_keys_changes_these_keys_of_a_copy(tmp_path):
    config = load_config(write(tmp_path, "a.toml", MINIMAL))
    changed = config.with_keys(model={"num_heads": 4}, training={"steps": 20})
    assert (changed.model.num_heads, changed.training.steps) == (4, 20)
    assert (config.model.num_heads, config.training.steps) == (2, 10)
    assert changed.with_keys(model={"num_heads": 2}, training={"steps": 10}) == config


def test_sections_are_frozen(tmp_path):
    config = load_config(write(tmp_path, "a.toml", MINIMAL))
    with pytest.raises(ValidationError):
        config.model.num_layers = 3  # type: ignore[misc]
    with pytest.raises(ValidationError):
        config.model = config.model  # type: ignore[misc]


def test_whole_numbers_stand_for_floats(tmp_path):
    config = load_config(write(tmp_path, "a.toml", MINIMAL), ["optimizer.lr=1", "optimizer.min_lr=0"])
    assert (config.optimizer.lr, config.optimizer.min_lr) == (1.0, 0.0)
    assert type(config.optimizer.lr) is type(config.optimizer.min_lr) is float


@pytest.mark.parametrize(
    ("override", "section", "key", "want"),
    [
        ("optimizer.lr=3e-4", "optimizer", "lr", 3e-4),
        ("precision.dtype=bf16", "precision", "dtype", "bf16"),
        ('precision.dtype="fp32"', "precision", "dtype", "fp32"),
        ("model.compile=true", "model", "compile", True),
        ("precision.loss_scale.rule=headroom", "precision.loss_scale", "rule", "headroom"),
        ("precision.loss_scale.rule=torch", "precision.loss_scale", "rule", "torch"),
        ("precision.loss_scale.rule=megatron", "precision.loss_scale", "rule", "megatron"),
        ("precision.loss_scale.rule=deepspeed", "precision.loss_scale", "rule", "deepspeed"),
        ("optimizer.adamw.betas=[0.8, 0.9]", "optimizer.adamw", "betas", (0.8, 0.9)),
        ("data.train=other/tokens=v2", "data", "train", (DataSource(path="other/tokens=v2"),)),
        (" training.steps = 7 ", "training", "steps", 7),
        ("parallelism.dp_size=2", "parallelism", "dp_size", 2),
    ],
)
def test_override_is_a_toml_value_or_else_text(tmp_path, override, section, key, want):
    config = load_config(write(tmp_path, "a.toml", MINIMAL), [override])
    assert getattr(attrgetter(section)(config), key) == want


def test_override_fills_groups(tmp_path):
    override = 'optimizer.groups=[{pattern = "*.norm.*", lr_factor = 2, weight_decay = 0}]'
    (group,) = load_config(write(tmp_path, "a.toml", MINIMAL), [override]).optimizer.groups
    assert (group.pattern, group.lr_factor, group.weight_decay) == ("*.norm.*", 2.0, 0.0)


def test_last_override_wins_over_earlier_and_file(tmp_path):
    path = write(tmp_path, "a.toml", MINIMAL)
    assert load_config(path, ["training.steps=20", "training.steps=30"]).training.steps == 30


def test_override_cannot_smuggle_in_a_second_key(tmp_path):
    (problem,) = problems_of(write(tmp_path, "a.toml", MINIMAL), "metrics.log_interval=3\nsteps = 4")
    assert problem.startswith(r'metrics.log_interval: got "3\nsteps = 4", must be a whole number')


def test_number_of_thousands_of_digits_is_refused_in_words(tmp_path):
    digits = "1" * 5000  # more than Python converts
    (problem,) = problems_of(write(tmp_path, "a.toml", MINIMAL), f"optimizer.lr={digits}")
    assert "..., must be a number; write for example lr = 0.0003" in problem
    (problem,) = problems_of(write(tmp_path, "b.toml", f"[model]\nnum_layers = {digits}\n"))
    assert "b.toml, is no TOML" in problem


@pytest.mark.parametrize("text", ["optimizer.lr", "lr=3", "=3", ".lr=3", "optimizer.=3"])
def test_malformed_override_is_named(tmp_path, text):
    (problem,) = problems_of(write(tmp_path, "a.toml", MINIMAL), text)
    assert f'got "{text}" as an override' in problem
    assert "write for example optimizer.lr=3e-4" in problem


def test_base_holds_where_the_file_is_silent(tmp_path):
    write(tmp_path, "deep/bottom.toml", MINIMAL)
    write(tmp_path, "deep/middle.toml", 'base = "bottom.toml"\n[training]\nsteps = 20\n[model]\nnum_layers = 2\n')
    top = write(tmp_path, "top.toml", 'base = "deep/middle.toml"\n[model]\nnum_layers = 3\n')
    config = load_config(top)
    assert (config.model.num_layers, config.training.steps, config.model.hidden_size) == (3, 20, 16)


SCALED = """
[model.rope_scaling]
rule = "llama3"
factor = 8.0
high_freq_factor = 2.0
"""


def test_tables_within_a_section_are_merged_key_by_key(tmp_path):
    write(tmp_path, "bottom.toml", MINIMAL + SCALED)
    top = write(tmp_path, "top.toml", 'base = "bottom.toml"\n[model.rope_scaling]\nfactor = 32\n')
    scaling = load_config(top, ["model.rope_scaling.original_seq_len=4096"]).model.rope_scaling
    assert scaling is not None
    assert (scaling.factor, scaling.high_freq_factor, scaling.original_seq_len) == (32.0, 2.0, 4096)
    (problem,) = problems_of(top, "model.rope_scaling.low_freq_factor=3")
    assert "high_freq_factor: got 2.0, must be greater than low_freq_factor 3" in problem
    (problem,) = problems_of(
        write(tmp_path, "b.toml", MINIMAL), 'model.rope_scaling={rule="llama3", factor=8, low_freq_factor=8}'
    )
    assert "high_freq_factor: got 4.0, must be greater than low_freq_factor 8" in problem


def test_circle_of_bases_is_named(tmp_path):
    write(tmp_path, "a.toml", 'base = "deep/b.toml"')
    write(tmp_path, "deep/b.toml", 'base = "../a.toml"')
    (problem,) = problems_of(tmp_path / "a.toml")
    assert "circle" in problem
    assert problem.index("a.toml ->") < problem.index("b.toml ->")
    assert problem.endswith("remove one base")


def test_file_cannot_be_its_own_base(tmp_path):
    assert "circle" in problems_of(write(tmp_path, "a.toml", 'base = "a.toml"'))[0]


def test_missing_base_names_both_files_and_the_near_one(tmp_path):
    write(tmp_path, "common.toml", MINIMAL)
    (problem,) = problems_of(write(tmp_path, "a.toml", 'base = "comon.toml"'))
    assert problem == (
        f"base: got {tmp_path / 'comon.toml'}, named by {tmp_path / 'a.toml'}, there is no such file; "
        f"did you mean {tmp_path / 'common.toml'}?"
    )


def test_a_base_of_megamix_beside_which_there_is_no_checkout_is_to_be_copied(tmp_path):
    (problem,) = problems_of(write(tmp_path, "a.toml", 'base = "configs/base.toml"'))
    assert problem.endswith(
        "there is no such file; write the path of a TOML file, a base's as seen from its file; megamix's own are in "
        "configs/ of its repository: copy the one you want"
    )


@pytest.mark.parametrize("value", ["3", '""', "[]"])
def test_base_must_be_a_path(tmp_path, value):
    (problem,) = problems_of(write(tmp_path, "a.toml", f"base = {value}"))
    assert problem.startswith(f"base: got {value} in ")


def test_missing_file_and_bad_override_are_both_reported(tmp_path):
    problems = problems_of(tmp_path / "none.toml", "oops")
    assert len(problems) == 2
    assert "there is no such file; write the path of a TOML file" in problems[0]
    assert problems[1].startswith("oops:")


def test_unreadable_files_are_named(tmp_path):
    assert "cannot be read" in problems_of(tmp_path)[0]  # a folder
    (tmp_path / "a.toml").write_bytes(b"\xff\xfe")
    assert "cannot be read" in problems_of(tmp_path / "a.toml")[0]


def test_toml_mistake_names_file_and_line(tmp_path):
    (problem,) = problems_of(write(tmp_path, "a.toml", "[model]\nnorm = rmsnorm\n"))
    assert "a.toml" in problem
    assert "line 2" in problem


def test_table_does_not_hide_a_mistake_below_it(tmp_path):
    path = write(tmp_path, "a.toml", f"metrics = 3\n{MINIMAL}")
    (problem,) = problems_of(path, "metrics.log_interval=5")
    assert problem == "metrics: got 3, must be a table; write [metrics] and its keys below it"


# By a cosine, without pipeline, tensor parallel ranks, validation and profile.
UNREAD = {
    *("training.eval_batches", "profiling.start_step", "metrics.sample_prompt"),
    *("model.qk_norm_over", "model.window_rope_theta"),
    "checkpoint.copy_keep",
    *("lr_schedule.warmup_tokens", "lr_schedule.decay_tokens"),
    *("parallelism.pp_schedule", "parallelism.pp_stages_per_rank"),
    *("parallelism.cp_method", "parallelism.ep_method", "parallelism.sequence_parallel"),
}


def full_tree():
    return {
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


@pytest.mark.parametrize(
    ("line", "key"), [("[model]", "family"), ("[optimizer]", "name"), ("[precision.loss_scale]", "rule")]
)
def test_the_key_that_chooses_the_others_is_shown_first(tmp_path, line, key):
    path = write(tmp_path, "run.toml", MINIMAL)
    shown = config_to_toml(load_config(path, ["precision.dtype=fp16"])).splitlines()
    assert shown[shown.index(line) + 1].startswith(f"{key} = ")


def test_effective_configuration_reads_back_equal(tmp_path):
    config = config_from_dict(full_tree())
    text = config_to_toml(config)
    assert load_config(write(tmp_path, "effective.toml", text)) == config


def test_effective_configuration_mentions_every_key_that_is_read(tmp_path):
    config = load_config(write(tmp_path, "a.toml", MINIMAL))
    text = config_to_toml(config)
    assert text.startswith("plugins = []\n")
    for name in [*SECTIONS, "optimizer.adamw", "precision.loss_scale"]:
        assert f"[{name}]" in text
        for key, value in attrgetter(name)(config):
            line = f"# {key}: not set\n" if value is None else f"{key} = "
            assert (f"\n{line}" in text) == (f"{name}.{key}" not in UNREAD) or isinstance(value, Section)


def test_every_shipped_configuration_is_right():
    files = sorted((Path(__file__).parents[2] / "configs").glob("*.toml"))
    assert files
    for path in files:
        assert isinstance(load_config(path), Config)


def test_a_run_s_own_configuration_may_list_keys_that_are_gone_at_their_defaults(tmp_path):
    """A user who goes on by a run's config.toml, which an earlier version has written."""
    gone = "[optimizer.nag]\ndampening = 0.0\n[precision.fp8]\nhalf_first = 0\nhalf_last = 0\n"
    (tmp_path / "run").mkdir()
    (tmp_path / "run/metrics.jsonl").touch()
    load_config(write(tmp_path, "run/config.toml", MINIMAL + gone))
    told = problems_of(write(tmp_path, "job.toml", MINIMAL + gone))
    assert any("half_first" in line and 'write but = ["blocks.0.*"]' in line for line in told)


def test_a_circle_of_links_is_told_in_a_line(tmp_path):
    """A user whose link leads back to itself."""
    (tmp_path / "job.toml").symlink_to("job.toml")
    (line,) = problems_of(tmp_path / "job.toml")
    assert "cannot be read: Too many levels of symbolic links" in line

"""Whoever writes a configuration: every mistake is reported, at once, with field, value and a fix that works."""

import copy
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from megamix.config import (
    Config,
    ConfigError,
    DataSource,
    check_world_size,
    config_from_dict,
    config_to_toml,
    grad_accum_steps,
    other_trainers,
)
from megamix.config.choices import section_at
from megamix.config.sections import SECTIONS
from megamix.config.toml_text import parse_value

Tree = dict[str, Any]

GOOD = {
    "model": {"vocab_size": 64, "seq_len": 8, "hidden_size": 24, "num_layers": 1, "num_heads": 6},
    "data": {"train": "tokens/train", "valid": "tokens/valid"},
    "optimizer": {"lr": 1e-3},
    "training": {"steps": 100, "micro_batch_size": 4, "global_batch_size": 16},
    "checkpoint": {"folder": "runs/x"},
}


def changed(**sections):
    tree = copy.deepcopy(GOOD)
    for name, values in sections.items():
        tree[name] = {**tree.get(name, {}), **values} if isinstance(values, dict) else values
    return tree


def put(tree, key, value):
    """The tree with a key's value."""
    name, _, rest = key.partition(".")
    return {**tree, name: put(tree.get(name, {}), rest, value) if rest else value}


def without(tree, key):
    name, _, rest = key.partition(".")
    if rest:
        return {**tree, name: without(tree[name], rest)}
    return {other: value for other, value in tree.items() if other != name}


def fields_of(table):
    section = section_at(Config, table.split("."), {})
    assert section is not None
    return section.model_fields


def problems_of(tree):
    with pytest.raises(ConfigError) as caught:
        config_from_dict(tree)
    return caught.value.problems


# One field: (section, key, value, what the line must say after "section.key: ").
SINGLE = [
    ("model", "num_layers", "12", 'got "12", must be a whole number; write for example num_layers = 4'),
    ("model", "num_layers", 2.0, "got 2.0, must be a whole number; write for example num_layers = 4"),
    ("model", "num_layers", True, "got true, must be a whole number; write for example num_layers = 4"),
    ("model", "num_layers", 0, "got 0, must be greater than 0; write for example num_layers = 4"),
    ("model", "num_layers", -3, "got -3, must be greater than 0; write for example num_layers = 4"),
    ("model", "num_kv_heads", 0, "got 0, must be greater than 0; leave num_kv_heads out to get its default"),
    (
        "model",
        "norm",
        "RMSnorm",
        "got \"RMSnorm\", must be 'rmsnorm', 'rmsnorm_1p' or 'layernorm'; write norm = \"rmsnorm\"",
    ),
    ("model", "norm", "batch", "must be 'rmsnorm', 'rmsnorm_1p' or 'layernorm' (Normalisation of attention,"),
    ("model", "compile", "True", 'got "True", must be true or false; write for example compile = false'),
    ("model", "compile", 1, "got 1, must be true or false; write for example compile = false"),
    (
        "data",
        "train",
        2024,
        'got 2024, must be text in quotes, or a list of tables; write for example train = "runs/data/train"',
    ),
    ("data", "train", "", 'got "", must not be empty; write for example train = "runs/data/train"'),
    ("data", "train", [], 'got [], must not be empty; write for example train = "runs/data/train"'),
    ("data", "train", [3], "got 3, must be a table"),
    ("data", "train", [{}], "must have either path or markov"),
    ("data", "train", [{"path": "a", "markov": 4}], "must have either path or markov"),
    ("data", "train", [{"path": "a", "weight": -1}], "got -1, must be greater than 0; write for example weight = 1.0"),
    ("data", "train", [{"path": "a", "weight": 1}, {"path": "b"}], "must have a weight in every table, or in none"),
    ("data", "train", [{"path": "a"}, {"markov": 4}], "must have weights, because markov has no end"),
    ("data", "train", [{"path": "a"}, {"path": "a"}], "must have each path and each markov once"),
    ("data", "train", [{"path": "x/a"}, {"path": "./x//y/../a"}], "must have each path and each markov once"),
    ("data", "train", [{"markov": 4, "weight": 3}, {"markov": 4, "weight": 1}], "once, with the sum of its weights"),
    (
        "data",
        "train",
        [{"path": "a", "weight": 0.123456789}, {"path": "b", "weight": 1}],
        "multiples of a 1,000,000th of their sum, such as 109889, 890108",
    ),
    ("data", "stages", [{"from_sample": 0, "train": "a"}], "must be greater than 0; write for example from_sample ="),
    ("data", "stages", [{"from_sample": 5, "train": [{"pth": "a"}]}], "unknown key"),
    ("data", "stages", [{"from_sample": 5, "train": "a"}] * 2, "must have a larger from_sample in each table than"),
    ("data", "packing", "docs", "must be 'none' or 'documents'"),
    ("optimizer", "lr", -0.1, "got -0.1, must be greater than 0; write for example lr = 0.0003"),
    ("optimizer", "lr", "3e-4", 'got "3e-4", must be a number; write for example lr = 0.0003'),
    ("optimizer", "lr", float("nan"), "got nan, must be a finite number; write for example lr = 0.0003"),
    ("optimizer", "clip_grad", float("inf"), "got inf, must be a finite number; write for example clip_grad = 1.0"),
    ("optimizer.adamw", "betas", 0.9, "got 0.9, must be a list; write for example betas = [0.9, 0.95]"),
    (
        "optimizer.adamw",
        "betas",
        [0.9],
        "got [0.9], must have 2 items (Decay rates of the first and second moment, each in [0, 1)); write",
    ),
    (
        "optimizer.adamw",
        "betas",
        [1, 2, 3],
        "must have 2 items (Decay rates of the first and second moment, each in [0, 1)); write for example",
    ),
    ("optimizer.adamw", "betas", [], "got [], must have 2 items (Decay rates of the first and second moment, each"),
    ("optimizer", "groups", [{"pattern": "*", "betas": [0.9]}], "groups[0].betas: got [0.9], must have 2 items"),
    (
        "optimizer",
        "groups",
        [{"pattern": "*", "lr": 0.1}],
        "groups[0].lr: unknown key, got 0.1; known are pattern, lr_",
    ),
    ("optimizer.muon", "ns_table", [[1.0, 2.0]], "ns_table[0]: got [1.0, 2.0], must have 3 items"),
    ("optimizer.muon", "ns_table", 1.0, "got 1.0, must be a list; write for example ns_table = []"),
    ("optimizer.muon", "ns_steps", 1, "got 1, but ns_table has 2 turns; write ns_steps = 2"),
    ("optimizer.nag", "momentum_form", "nesterov", "must be 'gradient' or 'velocity'"),
    ("optimizer.nag", "momentum", 1.0, "got 1.0, must be less than 1; write for example momentum = 0.9"),
    ("optimizer", "weight_decay", -1, "got -1, must be at least 0; write for example weight_decay = 0.1"),
    ("precision", "dtype", "fp61", "must be 'fp16', 'bf16' or 'fp32'; write dtype = \"fp16\""),
    ("precision", "grad_dtype", "fp16", "must be 'half' or 'fp32'"),
    ("precision", "reduce_dtype", "fp16", "must be 'half', 'half_fp32_sum' or 'fp32'"),
    (
        "precision.loss_scale",
        "init_scale",
        1000,
        "must be a power of two from 2**-126 to 2**126; write for example init_scale =",
    ),
    ("precision.loss_scale", "growth_factor", 1, "must be greater than 1; write for example growth_factor = 2.0"),
    ("precision.loss_scale", "backoff_factor", 1.0, "must be less than 1; write for example backoff_factor = 0.5"),
    ("precision.loss_scale", "max_scale", 2.0**200, "must be a power of two from 2**-126 to 2**126"),
    ("precision.loss_scale", "min_scale", 0.0, "must be greater than 0; write for example min_scale = 1.0"),
    ("precision.loss_scale", "margin", 1.0, "must be at least 2; write for example margin = 4.0"),
    ("precision.loss_scale", "rule", "of", "'deepspeed', 'static' or 'off'; write rule = \"off\""),
    ("precision.loss_scale", "rule", True, 'static, or off); write for example rule = "auto"'),
    ("optimizer", "name", "AdamW", "must be 'adamw', 'nag' or 'muon'; write name = \"adamw\""),
    ("model", "family", 3, "must be 'transformer' or 'transformers' (The kind of model; "),
    ("training", "steps", 0, "must be greater than 0; write for example steps = 1000"),
    ("training", "seed", -1, "must be at least 0; write for example seed = 1234"),
    ("training", "seed", 2**63, "must be less than 9.22337e+18; write"),
    ("metrics", "log_interval", 0, "must be greater than 0; write for example log_interval = 10"),
    ("optimizer", "groups", "x", "must be a list; write for example groups = [{ pattern ="),
    ("optimizer", "groups", [3], "got 3, must be a table; write for example groups = [{ pattern ="),
    ("optimizer", "groups", [{}], 'missing; write for example pattern = "*.bias"'),
    (
        "optimizer",
        "groups",
        [{"pattern": "x", "lr_factor": "2"}],
        'got "2", must be a number; write for example lr_factor = 1.0',
    ),
]


# What lets these keys be read.
BESIDE = {
    "optimizer.nag": {"optimizer": {"name": "nag"}},
    "optimizer.muon": {"optimizer": {"name": "muon"}},
    "ns_steps": {"optimizer": {"name": "muon", "muon": {"ns_table": [[1.0, 2.0, 3.0]] * 2}}},
    "precision.loss_scale": {"precision": {"loss_scale": {"rule": "dynamic"}}},
    "margin": {"precision": {"loss_scale": {"rule": "headroom"}}},
    "rule": {},
}


def with_value(section, key, value):
    beside = BESIDE.get(key, BESIDE.get(section, {}))
    return put(changed(**beside), f"{section}.{key}", value)


@pytest.mark.parametrize(("section", "key", "value", "want"), SINGLE)
def test_wrong_value_is_named_with_a_fix(section, key, value, want):
    (problem,) = problems_of(with_value(section, key, value))
    assert re.match(rf"{section}\.{key}(\[0\](\.\w+)?)*: ", problem)
    assert want in problem


@pytest.mark.parametrize(("section", "key", "value", "want"), [case for case in SINGLE if "[{" not in str(case[2])])
def test_proposed_fix_is_accepted(section, key, value, want):
    (problem,) = problems_of(with_value(section, key, value))
    fix = re.search(rf"write (?:for example )?{key} = (.*)$", problem)
    if not fix:
        assert problem.endswith(f"leave {key} out to get its default")
    if key == "num_layers" or section != "model":
        fixed = with_value(section, key, parse_value(fix[1]) if fix else None)
        config_from_dict(fixed if fix else without(fixed, f"{section}.{key}"))


@pytest.mark.parametrize(
    ("split", "want"),
    [
        (
            [95],
            "data.split: got [95], must have 2 items (Shares of each file's documents for training and for validation, "
            "on any scale); write for example split = [95, 5]",
        ),
        ([1, 0], "data.split[1]: got 0, must be greater than 0; write for example split = [95, 5]"),
        (
            [9, 1],
            "data.split: got [9.0, 1.0], but data.valid names other validation tokens; leave split or valid out, or "
            "name the set, as in data.valid.web",
        ),
    ],
)
def test_a_split_has_two_parts_and_stands_for_valid(split, want):
    assert problems_of(changed(data={"split": split})) == (want,)
    config_from_dict(changed(data={"split": [95, 5], "valid": None}, training={"eval_interval": 5}))
    config_from_dict(changed(data={"split": [95, 5], "valid": {"web": "tokens/web"}}))
    wrong = changed(data={"split": [95, 5], "valid": {"web": "tokens/web"}, "packing": "tight"})
    assert [problem.split(":")[0] for problem in problems_of(wrong)] == ["data.packing"]


_NAMES = "must name each set by 1 to 40 letters, digits, _ and -, but not path or markov or weight or split"


@pytest.mark.parametrize(
    ("valid", "want"),
    [
        ({"a b": "x"}, f'data.valid: got {{ "a b" = "x" }}, {_NAMES}, unlike "a b"; write for example valid = "r'),
        ({"": "x"}, f'data.valid: got {{ "" = "x" }}, {_NAMES}, unlike ""; '),
        ({"web": "x", "a/b": "x"}, f'data.valid: got {{ web = "x", "a/b" = "x" }}, {_NAMES}, unlike "a/b"; '),
        ({"path": "x"}, f'data.valid: got {{ path = "x" }}, {_NAMES}, unlike "path"; '),
        ({"split": "x"}, f'data.valid: got {{ split = "x" }}, {_NAMES}, unlike "split"; '),
        ({"w" * 41: "x"}, f"data.valid: got {{ {'w' * 41} = "),
        ({}, f"data.valid: got {{  }}, {_NAMES}; "),
        ({"web": 5}, 'data.valid.web: got 5, must be text in quotes, or a list of tables; write for example web = "'),
        ({"web": []}, 'data.valid.web: got [], must not be empty; write for example web = "runs/data/valid"'),
        ({"web": [{"path": 5}]}, 'data.valid.web[0].path: got 5, must be text in quotes; write for example path = "'),
        ({"web": [{"pth": "x"}]}, 'data.valid.web[0].pth: unknown key, got "x"; did you mean data.valid.web[0].path?'),
        ([{"pth": "x"}], 'data.valid[0].pth: unknown key, got "x"; did you mean data.valid[0].path?'),
        ([], 'data.valid: got [], must not be empty; write for example valid = "runs/data/valid"'),
    ],
)
def test_a_wrong_validation_set_is_reported_by_its_name(valid, want):
    (problem,) = problems_of(changed(data={"valid": valid}))
    assert problem.startswith(want)


def test_validation_sets_survive_the_way_to_toml_and_merge_by_name():
    config = config_from_dict(changed(data={"valid": {"web": "a", "code_2": [{"path": "b", "weight": 2}]}}))
    assert config_from_dict(tomllib.loads(config_to_toml(config))) == config
    above = config_from_dict(config.model_dump(), {"data": {"valid": {"web": "c"}}})
    assert above.data.valid == config.data.valid | {"web": (DataSource(path="c"),)}
    assert config_from_dict(config.model_dump(), {"data": {"valid": "c"}}).data.valid == {"": (DataSource(path="c"),)}


def test_no_key_of_model_is_missing_before_its_family_is_known():
    tree = GOOD | {"model": {"family": "gemma3", "folder": "models/gemma"}}
    (problem,) = problems_of(tree)
    assert problem.startswith("model.family: got \"gemma3\", must be 'transformer' or 'transformers' (The kind")


@pytest.mark.parametrize("key", ["attention_softcap", "logit_softcap", "logit_divisor", "embedding_scale"])
@pytest.mark.parametrize("value", [1e39, 1e-39])
def test_a_factor_that_fp32_does_not_hold_is_refused(key, value):
    (problem,) = problems_of(changed(model={key: value}))
    assert problem.startswith(f"model.{key}: got {value}, must be at ")


@pytest.mark.parametrize(
    ("optimizer", "want"),
    [
        (
            {"name": "adamw", "groups": [{"pattern": "x", "momentum": 0.5}]},
            "optimizer.groups[0].momentum: got 0.5, but the optimizer adamw has no momentum; leave it out",
        ),
        (
            {"name": "nag", "groups": [{"pattern": "y"}, {"pattern": "x", "betas": [0.9, 0.5]}]},
            "optimizer.groups[1].betas: got [0.9, 0.5], but the optimizer nag has no betas; leave it out",
        ),
        (
            {"name": "nag", "groups": [{"pattern": "x", "momentum": 0.99}], "nag": {"state_dtype": "bf16"}},
            'optimizer.nag.state_dtype: got "bf16", but at momentum 0.99 BF16 rounds away what moves; write '
            'state_dtype = "fp32", or momentum = 0.9',
        ),
        (
            {"schedules": {"momentum": {"end": 0.5}}},
            "optimizer.schedules.momentum: got a table, but the optimizer adamw has no momentum; leave it out",
        ),
        (
            {"schedules": {"beta2": {"end": 1.0}}},
            "optimizer.schedules.beta2.end: got 1.0, must be at least 0 and less than 1; write for example end = 0.0",
        ),
        (
            {"schedules": {"weight_decay": {"start": -1.0, "warmup_steps": 5}}},
            "optimizer.schedules.weight_decay.start: got -1.0, must be at least 0; write for example start = 0.0",
        ),
        (
            {"schedules": {"weight_decay": {"decay_steps": 5}}},
            "optimizer.schedules.weight_decay.decay_steps: got 5, but end is not set; write for example end = 0.0",
        ),
        (
            {"schedules": {"beta1": {"start": 0.5}}},
            "optimizer.schedules.beta1: got a table, but start and warmup_steps go together; write both, such "
            "as start = 0.0 and warmup_steps = 300",
        ),
        (
            {"schedules": {"beta1": {"start": 0.5, "warmup_steps": 60, "end": 0.5, "decay_steps": 41}}},
            "optimizer.schedules.beta1: got a table, but warmup_steps and decay_steps together exceed "
            "training.steps 100; write less",
        ),
    ],
)
def test_groups_and_momentum_that_do_not_go_together_are_named(optimizer, want):
    assert problems_of(changed(optimizer=optimizer)) == (want,)
    config_from_dict(changed(optimizer={"name": "muon", "groups": [{"pattern": "x", "momentum": 0.5, "eps": 1e-9}]}))


def test_missing_keys_are_listed_with_an_example():
    problems = problems_of({})
    required = {f"{name}.{key}" for name in SECTIONS for key, field in fields_of(name).items() if field.is_required()}
    assert {problem.split(":")[0] for problem in problems} == required
    assert "model.vocab_size: missing; write for example vocab_size = 2048" in problems


@pytest.mark.parametrize(
    ("tree", "want"),
    [
        (changed(training={"stepz": 5}), "training.stepz: unknown key, got 5; did you mean training.steps?"),
        (changed(parallelism={"seq_len": 5}), "parallelism.seq_len: unknown key, got 5; write it under [model]"),
        (changed(metrics={"zzz": "x" * 99}), f'metrics.zzz: unknown key, got "{"x" * 56}...; known are log_interval,'),
        (changed(metricks={"zzz": 1}), "metricks: unknown section, got { zzz = 1 }; did you mean metrics?"),
        (changed(lr=0.1), "lr: unknown key, got 0.1; write it under [optimizer]"),
        (
            changed(optimizer={"groups": [{"pattern": "x", "lr_facto": 2}]}),
            "optimizer.groups[0].lr_facto: unknown key, got 2; did you mean optimizer.groups[0].lr_factor?",
        ),
        (changed(optimizer={"eps": 1e-6}), "optimizer.eps: unknown key, got 1e-06; write it under [optimizer.adamw]"),
    ],
)
def test_unknown_names_are_refused_with_the_nearest(tree, want):
    (problem,) = problems_of(tree)
    assert problem.startswith(want)


@pytest.mark.parametrize(
    ("tree", "want"),
    [
        (changed(learning_rate=1e-3), "learning_rate: unknown key, got 0.001; it is optimizer.lr here"),
        (
            changed(optimizer={"learning_rate": 1}),
            "optimizer.learning_rate: unknown key, got 1; it is optimizer.lr here",
        ),
        (changed(training={"max_steps": 9}), "training.max_steps: unknown key, got 9; it is training.steps here"),
        (changed(model={"n_head": 6}), "model.n_head: unknown key, got 6; it is model.num_heads here"),
        (
            changed(num_train_epochs=3),
            "num_train_epochs: unknown key, got 3; there are no epochs; write training.steps,",
        ),
        (
            changed(zero_optimization={"stage": 2}),
            "zero_optimization: unknown section, got { stage = 2 }; it is parallelism.shard here (stage 1 is "
            '"states", 2 "gradients", 3 "parameters")',
        ),
        (
            changed(fp16={"enabled": True}),
            'fp16: unknown section, got { enabled = true }; it is precision.dtype = "fp16"',
        ),
        (
            changed(training={"weight_decay": 0.1}),
            "training.weight_decay: unknown key, got 0.1; write it under [optimizer]",
        ),
    ],
)
def test_another_trainer_s_key_is_refused_with_ours(tree, want):
    (problem,) = problems_of(tree)
    assert problem.startswith(want)


KEY_HERE = re.compile(rf"\b(?:{'|'.join(SECTIONS)})(?:\.[a-z_]+)+")


@pytest.mark.parametrize("name", [*other_trainers.names()["here"], *other_trainers.names()["instead"]])
def test_a_hint_names_keys_that_exist(name):
    told = other_trainers.called_here(f"--{name.replace('_', '-')}")
    assert told is not None
    assert not any(name in fields_of(section) for section in SECTIONS)  # its own place would be the better answer
    for key in KEY_HERE.findall(told):
        *table, last = key.split(".")
        names = {"rule", "init_scale", "growth_interval", "min_scale"} if table == ["precision", "loss_scale"] else ()
        section = section_at(Config, table, GOOD)
        assert last in names or (section is not None and last in section.model_fields), key


def test_the_page_s_table_of_other_trainers_agrees_with_the_hints():
    page = (Path(__file__).parents[2] / "docs/configuration.md").read_text()
    table = page.partition("| what | Megatron-LM |")[2].partition("\n\n")[0]
    rows = [line.split(" | ") for line in table.splitlines()[2:]]
    assert len(rows) > 30
    ours = {key for section in SECTIONS for key in fields_of(section)}
    for _, *theirs, here in rows:
        names = [name.rpartition(".")[2].lstrip("-").replace("-", "_") for cell in theirs for name in ticked(cell)]
        for name in names:
            if name in ours or name in ("betas", "mode", "folder", "max_norm", "stage", "enabled"):
                continue
            told = other_trainers.called_here(name)
            assert told is not None, name
            assert "none" in here or "derived" in here or set(KEY_HERE.findall(here)) & set(KEY_HERE.findall(told)), (
                name
            )


def ticked(cell):
    return re.findall(r"`([\w.-]+)`", cell)


@pytest.mark.parametrize(
    ("section", "key", "value", "want"),
    [
        ("optimizer.schedules", "lr", {"end": 0.1}, "unknown key, got { end = 0.1 }; known are weight_decay"),
        ("optimizer", "momentum", 0.9, "unknown key, got 0.9; write it in the table of nag or muon"),
        ("training", "ema_decay", 0.99, "unknown key, got 0.99; it is training.average.decay here"),
        ("training", "tokens", "20B", "must be a whole number; write for example tokens = 20000000000"),
        ("lr_schedule", "warmup_tokens", 5, "where training.tokens = 0; write training.tokens = 20000000000, or leave"),
    ],
)
def test_what_is_said_elsewhere_or_otherwise_here_is_told(section, key, value, want):
    (problem,) = problems_of(with_value(section, key, value))
    assert want in problem


def test_misspelt_section_is_one_mistake():
    tree = changed()
    tree["modle"] = tree.pop("model")
    (problem,) = problems_of(tree)
    assert "did you mean model?" in problem


def scaled(**keys):
    return {"precision": {"dtype": "fp16", "loss_scale": keys}}


# Between fields: (changes, field that the line names, what it says, changes that repair it).
CROSS = [
    ({"model": {"hidden_size": 100}}, "model.hidden_size", "= 108", {"model": {"hidden_size": 108}}),
    ({"model": {"hidden_size": 5}}, "model.hidden_size", "hidden_size = 12", {"model": {"hidden_size": 12}}),
    ({"model": {"hidden_size": 18}}, "model.hidden_size", "head size of 3", {"model": {"hidden_size": 24}}),
    ({"model": {"hidden_size": 18}}, "model.hidden_size", '"learned"', {"model": {"position": "learned"}}),
    ({"model": {"num_kv_heads": 4}}, "model.num_kv_heads", "num_kv_heads = 3", {"model": {"num_kv_heads": 3}}),
    ({"model": {"num_kv_heads": 12}}, "model.num_kv_heads", "num_kv_heads = 6", {"model": {"num_kv_heads": 6}}),
    ({"optimizer": {"min_lr": 0.1}}, "optimizer.min_lr", "min_lr = 0.0001", {"optimizer": {"min_lr": 0.0001}}),
    ({"lr_schedule": {"warmup_steps": 101}}, "lr_schedule.warmup_steps", "= 10", {"lr_schedule": {"warmup_steps": 10}}),
    (
        {"lr_schedule": {"warmup_steps": 30, "decay_steps": 80}},
        "lr_schedule.decay_steps",
        "30 + decay_steps 80 exceeds training.steps 100; write a smaller warmup_steps",
        {"lr_schedule": {"warmup_steps": 30, "decay_steps": 70}},
    ),
    (
        {"lr_schedule": {"warmup_steps": 100, "decay_steps": 1}},
        "lr_schedule.decay_steps",
        "write a smaller warmup_steps",
        {"lr_schedule": {"warmup_steps": 99, "decay_steps": 1}},
    ),
    (
        {"lr_schedule": {"decay_style": "wsd"}},
        "lr_schedule.decay_steps",
        'not set, but decay_style = "wsd" needs the length of its final decay; write decay_steps = 20',
        {"lr_schedule": {"decay_style": "wsd", "decay_steps": 20}},
    ),
    (
        {"precision": {"dtype": "fp16", "loss_scale": {"rule": "off"}}},
        "precision.loss_scale.rule",
        'write rule = "auto", or dtype = "bf16"',
        {"precision": {"dtype": "bf16", "loss_scale": {"rule": "off"}}},
    ),
    (
        {"precision": {"reduce_dtype": "fp32"}},
        "precision.reduce_dtype",
        'a wider format on the wire adds no information; write reduce_dtype = "half_fp32_sum", or grad_dtype = "fp32"',
        {"precision": {"reduce_dtype": "fp32", "grad_dtype": "fp32"}},
    ),
    (
        {"precision": {"reduce_dtype": "half_fp32_sum", "grad_dtype": "fp32"}},
        "precision.reduce_dtype",
        'write reduce_dtype = "fp32"',
        {"precision": {"reduce_dtype": "half_fp32_sum", "grad_dtype": "half"}},
    ),
    (
        {"precision": {"reduce_dtype": "half", "dtype": "fp32"}},
        "precision.reduce_dtype",
        'FP32 with dtype = "fp32" and grad_dtype = "half"; write reduce_dtype = "fp32"',
        {"precision": {"reduce_dtype": "fp32", "dtype": "fp32"}},
    ),
    (scaled(min_scale=2.0**33), "precision.loss_scale.min_scale", "at most max_scale", scaled()),
    (scaled(init_scale=2.0**33), "precision.loss_scale.init_scale", "= 4294967296", scaled()),
    (scaled(init_scale=0.5), "precision.loss_scale.init_scale", "= 1.0", scaled(init_scale=1.0)),
    (
        scaled(rule="megatron", max_scale=2.0**20),
        "precision.loss_scale.init_scale",
        "got 4294967296.0, must lie from min_scale 1.0 to max_scale 1048576.0; write init_scale = 1048576.0",
        scaled(rule="torch", max_scale=2.0**20),
    ),
    (
        {"training": {"global_batch_size": 18}},
        "training.global_batch_size",
        "of micro_batch_size 4; write global_batch_size = 20",
        {"training": {"global_batch_size": 20}},
    ),
    ({"training": {"global_batch_size": 2}}, "training.global_batch_size", "= 4", {"training": {}}),
    (
        {"training": {"batch_ramp": [[0, 8], [5, 10], [9, 16]]}},
        "training.batch_ramp[1][1]",
        "got 10, must be a multiple of micro_batch_size 4; write batch_ramp[1][1] = 12",
        {"training": {"batch_ramp": [[0, 8], [5, 12], [9, 16]]}},
    ),
    ({"model": {"recompute": {"full": 2}}}, "model.recompute.full", "num_layers is 1; write full = 1", {}),
    (
        {"model": {"recompute": {"full": 1.5}}},
        "model.recompute.full",
        "got 1.5, must be a whole number of layers, or a share below 1; write for example full = 12",
        {"model": {"recompute": {"full": 0.5}}},
    ),
    (
        {"model": {"recompute": {"full": 1.0}}},
        "model.recompute.full",
        "got 1.0, must be a whole number of layers, or a share below 1; write for example full = 12",
        {"model": {"recompute": {"full": 0.5}}},
    ),
    ({"model": {"recompute": "fully"}}, "model.recompute", "must be 'none', 'selective' or 'full'; write", {}),
    (
        {"training": {"batch_ramp": [[0, 8]]}},
        "training.global_batch_size",
        "got 16, must be the last size of batch_ramp; write global_batch_size = 8",
        {"training": {"batch_ramp": [[0, 8]], "global_batch_size": 8}},
    ),
    *(
        ({"training": {"batch_ramp": ramp}}, "training.batch_ramp", "update 0 in its first pair", {})
        for ramp in ([[1, 16]], [[0, 8], [0, 16]], [[0, 4], [9, 8], [5, 16]])
    ),
    (
        {"training": {"eval_interval": 5}, "data": {"valid": None}},
        "training.eval_interval",
        "write valid under [data], or eval_interval = 0",
        {"training": {"eval_interval": 0}},
    ),
    (
        {"profiling": {"start_step": 98, "num_steps": 5}},
        "profiling.start_step",
        "got 98, with num_steps it ends at 103, training.steps is 100; write smaller ones",
        {"profiling": {"start_step": 95, "num_steps": 5}},
    ),
    ({"profiling": {"num_steps": 101}}, "profiling.start_step", "it ends at 101", {"profiling": {"num_steps": 100}}),
]


@pytest.mark.parametrize(("wrong", "field", "want", "right"), CROSS)
def test_fields_that_contradict_each_other(wrong, field, want, right):
    tree = changed(**wrong)
    tree["data"] = {key: value for key, value in tree["data"].items() if value is not None}
    (problem,) = problems_of(tree)
    assert problem.startswith(f"{field}: ")
    assert want in problem
    assert isinstance(config_from_dict(changed(**right)), Config)


def test_all_mistakes_are_shown_at_once():
    tree = changed(
        model={"hidden_size": 100, "norm": 3},
        optimizer={"lr": -1, "min_lr": 5},
        training={"stepz": 3, "global_batch_size": 18},
        precision={"dtype": "fp16", "loss_scale": {"rule": "off", "init_scale": 3}},
    )
    problems = problems_of(tree)
    assert sorted(problem.split(":")[0] for problem in problems) == [
        "model.hidden_size",
        "model.norm",
        "optimizer.lr",
        "precision.loss_scale.init_scale",  # not read
        "precision.loss_scale.rule",
        "training.global_batch_size",
        "training.stepz",
    ]
    with pytest.raises(ConfigError, match="configuration: 7 problems") as caught:
        config_from_dict(tree)
    assert len(str(caught.value).splitlines()) == 8


def test_checks_on_unusable_values_are_left_out_and_the_others_kept():
    tree = changed(model=3, optimizer={"lr": "x", "min_lr": 5}, training={"steps": None, "global_batch_size": 6})
    fields = [problem.split(":")[0] for problem in problems_of(tree)]
    assert sorted(fields) == ["model", "optimizer.lr", "training.global_batch_size", "training.steps"]
    tree = changed(
        parallelism={"dp_size": "x", "pp_size": 2, "pp_schedule": "x", "pp_stages_per_rank": 2},
        training={"global_batch_size": 6},
    )
    fields = [problem.split(":")[0] for problem in problems_of(tree)]
    assert sorted(fields) == [
        "parallelism.dp_size",
        "parallelism.pp_schedule",
        "parallelism.pp_size",  # more stages than layers
        "training.global_batch_size",
    ]


def test_one_problem_is_counted_in_the_singular():
    with pytest.raises(ConfigError, match=r"^configuration: 1 problem\n  training\.seed: "):
        config_from_dict(changed(training={"seed": -1}))


def test_world_size_that_fits_has_no_problem():
    assert check_world_size(config_from_dict(GOOD), 2) == []
    assert check_world_size(config_from_dict(changed(parallelism={"dp_size": 4})), 4) == []


def test_world_size_that_does_not_fit_is_multiplied_out():
    assert check_world_size(config_from_dict(GOOD), 3) == [
        "training.global_batch_size: got 16, must be a multiple of micro_batch_size 4 * 3 data-parallel ranks = "
        "12; write global_batch_size = 24"
    ]
    assert check_world_size(config_from_dict(changed(parallelism={"dp_size": 4})), 2) == [
        "parallelism.dp_size: got 4, all sizes multiply to 4 ranks, but 2 were started; write dp_size = 2 or start 4"
    ]
    mesh, batch = check_world_size(config_from_dict(changed(parallelism={"dp_size": 3})), 2)  # the cause comes first
    assert mesh.startswith("parallelism.dp_size: got 3, ")
    assert batch.startswith("training.global_batch_size: got 16, must be a multiple of micro_batch_size 4 * 3 ")


def test_grad_accum_steps_is_what_the_ranks_leave():
    config = config_from_dict(GOOD)
    assert [grad_accum_steps(config, dp_size) for dp_size in (1, 2, 4)] == [4, 2, 1]
    with pytest.raises(ValueError, match="multiple of micro_batch_size 4 \\* 3 data-parallel ranks = 12"):
        grad_accum_steps(config, 3)

"""Whoever sets a key that another one makes meaningless: a key that would not be read is refused, or dropped and
reported, over any layers. The shown configuration has no such key and loads as the same; every command of the pages is
accepted.
"""

import random
import re
import shlex
from pathlib import Path

import pytest

from megamix.cli.verbs import main
from megamix.config import Config, ConfigError, config_from_dict, effective_tables, load_config
from megamix.config.model_and_data import SCALING
from megamix.config.toml_text import parse_value, value_text
from megamix.config.unread import READ_WHERE, default
from megamix.plugins import LOSS_SCALES, OPTIMIZERS
from tests.config.test_errors import GOOD, changed, problems_of, put
from tests.conftest import FULL

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "configs/quickstart.toml"
SCALED = {"model": {"rope": {"scaling": {"rule": "linear", "factor": 2.0}}}}
TOKENS = {"training": {"tokens": 10_000, "steps": None}}
INVERSE_SQRT = {"lr_schedule": {"decay_style": "inverse_sqrt"}}


def scaled(**keys):
    return {"precision": {"dtype": "fp16", "loss_scale": keys}}


# Of each key: a value that is not its default, and beside what it is not read.
CASES = {
    "model.rope.scaling.low_freq_factor": (2.0, SCALED),
    "model.rope.scaling.high_freq_factor": (8.0, SCALED),
    "model.rope.scaling.original_seq_len": (4096, SCALED),
    "model.rope.scaling.beta_fast": (16.0, SCALED),
    "model.rope.scaling.beta_slow": (2.0, SCALED),
    "model.rope.scaling.attention_factor": (1.5, SCALED),
    "model.window.rope_theta": (100.0, {"model": {"window": {"sizes": [0]}}}),
    "optimizer.min_lr": (1e-4, {"lr_schedule": {"decay_style": "constant"}}),
    "optimizer.adamw": ({"betas": [0.8, 0.9], "eps": 1e-6}, {"optimizer": {"name": "nag"}}),
    "optimizer.nag": ({"momentum": 0.5}, {}),
    "optimizer.muon": ({"momentum": 0.5}, {}),
    "lr_schedule.warmup_steps": (5, TOKENS),
    "lr_schedule.warmup_tokens": (100, {}),
    "lr_schedule.decay_tokens": (100, TOKENS | INVERSE_SQRT),
    "training.steps": (20, TOKENS),
    "lr_schedule.decay_steps": (5, INVERSE_SQRT),
    "precision.loss_scale.init_scale": (65536, {}),
    "precision.loss_scale.growth_factor": (4, scaled(rule="megatron")),
    "precision.loss_scale.backoff_factor": (0.25, scaled(rule="headroom")),
    "precision.loss_scale.growth_interval": (50, scaled(rule="headroom")),
    "precision.loss_scale.hysteresis": (3, scaled(rule="torch")),
    "precision.loss_scale.consecutive_hysteresis": (True, scaled()),
    "precision.loss_scale.margin": (8, scaled(rule="dynamic")),
    "precision.loss_scale.min_scale": (2, scaled(rule="static", init_scale=1024)),
    "precision.loss_scale.max_scale": (2**20, {"precision": {"loss_scale": {"rule": "off"}}}),
    "precision.max_retries": (5, {"precision": {"on_overflow": "skip"}}),
    "training.eval_batches": (4, {"data": {"valid": None}}),
    "checkpoint.async_save": (False, {"checkpoint": {"save_interval": 0}}),
    "checkpoint.on_save_failure": ("stop", {"checkpoint": {"save_interval": 0}}),
    "metrics.sample_prompt": ("Once upon a time", {}),
    "profiling.start_step": (3, {}),
}


def outcome(*trees):
    try:
        return config_from_dict(*trees)
    except ConfigError as error:
        return error.problems


def write(path, text):
    path.write_text(text, encoding="utf-8")
    return path


def told(path, *overrides):
    lines = []
    return load_config(path, overrides, lines.append), lines


def test_there_is_a_case_of_every_key_that_is_not_always_read():
    of_rules = {f"precision.loss_scale.{key}" for rule in LOSS_SCALES.sections.values() for key in rule.model_fields}
    of_rules |= {f"model.rope.scaling.{key}" for rule in SCALING.sections().values() for key in rule.model_fields}
    own = {f"optimizer.{name}" for name in OPTIMIZERS.sections}
    always = {"precision.loss_scale.rule", "model.rope.scaling.rule", "model.rope.scaling.factor"}
    assert set(CASES) == {*READ_WHERE, *of_rules, *own} - always


@pytest.mark.parametrize("key", CASES)
def test_a_key_without_effect_is_refused_with_ways_out_and_dropped_below_what_makes_it_so(key):
    value, beside = CASES[key]
    (problem,) = problems_of(put(changed(**beside), key, value))
    assert problem.startswith(f"{key}: got {value_text(value)}, which is not read where ")
    said = problem.partition("; write")[0]
    assert any(name in said for keys in beside.values() for name in keys) or not beside
    assert problem.endswith(f", or leave {key.rpartition('.')[2]} out")
    # Both ways out work: without the key all is well, and with the other setting it is read.
    config_from_dict(changed(**beside))
    fixes = re.findall(r"(?:; write| or) ([\w.]+) = (.+?)(?= or \w+\.|, or leave)", problem)
    assert len(fixes) == len(READ_WHERE.get(key, [[()]])[0])
    for decider, text in fixes:
        again = outcome(put(put(changed(**beside), key, value), decider, parse_value(text)))
        of_key = [] if isinstance(again, Config) else [line for line in again if line.startswith(f"{key}: ")]
        assert not [line for line in of_key if "is not read where" in line]
    assert not isinstance(outcome(changed(**beside), put({}, key, value)), Config)
    below = outcome(put(GOOD, key, value), beside)
    if beside:
        assert below == config_from_dict(changed(**beside))
    else:  # by a setting that nobody chose, and that so holds from below
        assert not isinstance(below, Config)


def test_a_default_that_is_not_read_harms_nobody():
    defaults = {key: default(key, {}) for key in READ_WHERE}
    for name, section in OPTIMIZERS.sections.items():
        defaults[f"optimizer.{name}"] = {key: field.default for key, field in section.model_fields.items()}
    for key in ("growth_factor", "backoff_factor", "consecutive_hysteresis", "margin"):  # rules agree on these
        readers = (rule.model_fields[key] for rule in LOSS_SCALES.sections.values() if key in rule.model_fields)
        defaults[f"precision.loss_scale.{key}"] = next(readers).default
    for key, value in defaults.items():
        _, beside = CASES[key]
        listed = list(value) if isinstance(value, tuple) else value
        assert config_from_dict(put(changed(**beside), key, listed)) == config_from_dict(changed(**beside))


def test_what_a_layer_below_set_for_another_rule_is_dropped_with_a_line(tmp_path):
    config, lines = told(QUICKSTART, "precision.dtype=bf16")
    auto = 'is not read where precision.loss_scale.rule = "auto" and precision.dtype = "bf16": dropped'
    assert lines == [
        f"precision.loss_scale.{said} of {QUICKSTART} {auto}"
        for said in ("init_scale = 16777216", "growth_interval = 50")
    ]
    assert dict(config.precision.loss_scale) == {"rule": "auto"}
    top = write(tmp_path / "top.toml", f'base = "{QUICKSTART}"\n[precision]\ndtype = "bf16"\n')
    assert told(top) == (config, lines)
    _, lines = told(QUICKSTART, "training.tokens=1000000")
    assert any("warmup_steps" in line and line.endswith("write lr_schedule.warmup_tokens instead") for line in lines)
    # Overrides are layers in their order, too.
    _, lines = told(QUICKSTART, "optimizer.lr=0.1", "optimizer.adamw.eps=1e-6", "optimizer.name=nag")
    assert lines == [
        'optimizer.adamw = { eps = 1e-06 } of the command line is not read where optimizer.name = "nag": dropped'
    ]


def test_a_rate_that_was_chosen_for_another_optimizer_is_told(tmp_path):
    _, lines = told(QUICKSTART, "optimizer.name=adamw")
    rate = (
        'optimizer.lr = 0.008 of {} was chosen for name = "muon", and the command line has "adamw": write its lr, too'
    )
    assert rate.format(ROOT / "configs/base.toml") in lines
    top = write(tmp_path / "top.toml", f'base = "{QUICKSTART}"\n[optimizer]\nname = "nag"\nlr = 0.1\n')
    own = ["optimizer.lr=2e-3", "optimizer.name=adamw"], ["optimizer.name=adamw", "optimizer.lr=2e-3"]
    for path, overrides in ((top, []), (top, ["optimizer.name=nag"]), (QUICKSTART, own[1]), (QUICKSTART, own[0])):
        assert not [line for line in told(path, *overrides)[1] if "was chosen for" in line]


def test_a_rule_on_top_of_another_drops_its_keys_and_a_table_that_is_off_begins_anew(tmp_path):
    scaled = "[model.rope.scaling]\nrule = 'llama3'\nfactor = 8.0\nlow_freq_factor = 2.0\n"
    base = write(tmp_path / "base.toml", config_from_dict(GOOD).text + scaled)
    config, lines = told(base, "model.rope=false")
    assert (config.model.rope, lines) == (None, [])
    config, lines = told(base, "model.rope.scaling.rule=linear")
    assert [line.split(" = ")[0] for line in lines] == ["model.rope.scaling.low_freq_factor"]
    assert "low_freq_factor" not in config.text
    with pytest.raises(ConfigError, match=r"model\.rope\.scaling\.rule: missing"):
        load_config(base, ["model.rope=false", "model.rope.scaling.factor=4.0"])
    off = ["model.rope=false", "model.window.sizes=[4]", "model.window.rope_theta=50.0"]
    with pytest.raises(ConfigError, match=r"rope_theta: got 50.0, which is not read where model\.rope = false; write"):
        load_config(base, off)
    assert load_config(base, [*off[1:], off[0]]).model.window.rope_theta is None


def test_all_are_reported_at_once_beside_other_mistakes_and_none_follows_from_one():
    scale = {"rule": "torhc", "hysteresis": 2}
    tree = changed(optimizer={"lr": -1, "nag": {"momentum": 3}}, precision={"loss_scale": scale})
    starts = sorted(problem.split(",")[0] for problem in problems_of(tree))
    assert starts == [
        "optimizer.lr: got -1", "optimizer.nag: got { momentum = 3 }", 'precision.loss_scale.rule: got "torhc"',
    ]  # fmt: skip


def test_the_lines_are_told_once_by_the_first_rank(capsys, monkeypatch, tmp_path):
    overrides = ["optimizer.name=nag", "optimizer.lr=0.1", f"checkpoint.folder={tmp_path}", "data.train=none"]
    path = write(tmp_path / "job.toml", f'base = "{QUICKSTART}"\n[optimizer.adamw]\nbetas = [0.8, 0.9]\n')
    line = f'optimizer.adamw = {{ betas = [0.8, 0.9] }} of {path} is not read where optimizer.name = "nag": dropped'
    for rank, want in (("0", f"megamix train: {line}\n"), ("1", "")):
        monkeypatch.setenv("RANK", rank)
        assert main(["train", str(path), *overrides, "--check"]) == 2  # there are no tokens
        assert capsys.readouterr().out == want
    assert main(["config", str(path), *overrides, "--show"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"# {line}\nplugins = []\n\n[model]\n")
    assert load_config(write(tmp_path / "shown.toml", shown)) == load_config(path, overrides)


def lines(keys):
    return "".join(f"{key} = {value_text(value)}\n" for key, value in keys.items())


def test_defaults_of_an_effective_configuration_are_no_choice_and_an_edit_is(tmp_path):
    shown = load_config(QUICKSTART, ["precision.dtype=bf16", "optimizer.name=adamw"]).text
    path = write(tmp_path / "config.toml", shown.replace('name = "adamw"', 'name = "nag"'))
    assert load_config(path).optimizer.name == "nag"  # AdamW's keys stand there with their defaults
    write(path, path.read_text().replace("betas = [0.9, 0.95]", "betas = [0.8, 0.95]"))
    with pytest.raises(ConfigError, match=r"optimizer\.adamw: got \{ betas"):
        load_config(path)
    without = shown.replace('packing = "none"\n', "")  # as from before this key came
    assert without != shown
    assert effective_tables(without) == effective_tables(shown)


def test_another_choice_on_top_of_an_effective_configuration_has_its_own_defaults(tmp_path):
    scaled = {"precision": {"dtype": "fp16", "loss_scale": {"rule": "dynamic", "hysteresis": 3}}}
    path = write(tmp_path / "config.toml", config_from_dict(changed(**scaled)).text)
    config, dropped = told(path, "precision.loss_scale.rule=megatron")
    scale = dict(config.precision.loss_scale)
    assert (scale["init_scale"], scale["growth_interval"], scale["hysteresis"], dropped) == (2.0**32, 1000, 3, [])


def test_every_command_of_the_pages_still_goes():
    ran = 0
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "configs").glob("*"))]:
        text = page.read_text(encoding="utf-8").replace("\\\n", " ")  # a command on several lines
        for match in re.finditer(r"(?:megamix (?:config|train|plan|verify)|launch/\w+\.sh) ([^`\n|]*)", text):
            words = shlex.split(match[1].partition("  #")[0].rstrip("):;,."), comments=True)
            files = [ROOT / word for word in words if word.endswith(".toml") and (ROOT / word).is_file()]
            overrides = [word for word in words if re.fullmatch(r"\w+(\.\w+)+=.+", word)]
            if page.name == "configuration.md" and {"model.hiden_size=200", "optimizer.eps=1e-6"} & {*overrides}:
                continue  # the page's examples of mistakes
            if files or overrides:
                assert isinstance(load_config((files or [QUICKSTART])[0], overrides), Config), (page, words)
            ran += bool(overrides)
    assert ran >= 6


JUNK = ["x", "off", -1, 0, 1, 3.5, 2**20, True, [], [0.5, 0.9], {"rule": "llama3", "factor": 8.0}, {}]


def some_layers(rng):
    """Three, over which a few cases, the settings beside them, defaults and junk are strewn."""
    layers = [{}, {}, {}]
    for key in rng.sample(sorted(CASES), rng.randint(1, 3)):
        value, beside = CASES[key]
        if "rope.scaling." not in key:
            for section, keys in beside.items():
                rng.choice(layers).setdefault(section, {}).update({k: v for k, v in keys.items() if v is not None})
        else:
            rule = {"rule": rng.choice(sorted(SCALING.sections())), "factor": 2.0}
            layers[0] = put(layers[0], "model.rope.scaling", rule)
        layer = rng.randrange(3)
        layers[layer] = put(layers[layer], key, value)
    if rng.random() < 0.2:
        section, name = rng.choice([*READ_WHERE, "optimizer.name", "lr_schedule.decay_style"]).split(".")[:2]
        rng.choice(layers).setdefault(section, {})[name] = rng.choice(JUNK)
    return layers


def test_what_is_accepted_is_shown_and_loads_equal_and_what_is_refused_names_its_key(tmp_path):
    counts = {"accepted": 0, "with a line": 0, "refused": 0}
    for seed in range(20000 if FULL else 160):
        bottom, middle, top = some_layers(random.Random(seed))
        whole = {name: {**GOOD.get(name, {}), **bottom.get(name, {})} for name in {**GOOD, **bottom}}
        base, path = tmp_path / "base.toml", tmp_path / "job.toml"
        write(base, "".join(f"[{name}]\n{lines(keys)}" for name, keys in whole.items()))
        write(path, 'base = "base.toml"\n' + "".join(f"[{name}]\n{lines(keys)}" for name, keys in middle.items()))
        overrides = [f"{name}.{key}={value_text(value)}" for name, keys in top.items() for key, value in keys.items()]
        heard = []
        try:
            config = load_config(path, overrides, heard.append)
        except ConfigError as error:
            nameless = [line for line in error.problems if not re.match(r"\w+(\.\w+|\[\d+\])+: ", line)]
            assert (nameless, heard) == ([], []), seed
            counts["refused"] += 1
            continue
        text = config.text
        again, more = told(write(tmp_path / "again.toml", text))
        assert (again, more, again.text) == (config, [], text), seed
        counts["accepted"] += 1
        counts["with a line"] += bool(heard)
    assert min(counts.values()) > 10, counts

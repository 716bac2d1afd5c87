"""Whoever writes a plugin, or gets a configuration that names one: names that plugins register are checked in
configurations like built-in ones; a plugin is imported only if the user names it.
"""

import json
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from pydantic import Field, create_model

from megamix import AdamW
from megamix.checkpoint.manifest import RunRecord, read_manifest
from megamix.cli.verbs import main
from megamix.config import ConfigError, ModelConfig, config_from_dict, config_schema, load_config
from megamix.model.family import family_of
from megamix.model.transformer import Transformer
from megamix.plugins import (
    OPTIMIZERS,
    READERS,
    PluginError,
    Section,
    import_plugins,
    register_family,
    register_loss_scale,
    register_optimizer,
    register_reader,
    register_source,
    register_tracker,
)
from megamix.train.objects import build_optimizer
from megamix.train.own_code import own_code
from megamix.train.ranks_agree import RankGroup, differences, started_with
from megamix.train.resume_rules import changes
from tests.builders import lrs_of, run_on_ranks, tiny_job
from tests.checkpoint.seal import edit
from tests.config.test_errors import changed, problems_of

PLUGIN = """
from pydantic import Field

import megamix
from megamix import plugins


class Lion(plugins.Section):
    beta: float = Field(0.9, lt=1)
    \"\"\"What it remembers.\"\"\"
    sign: bool = Field(examples=[True])


class Steady(plugins.Section):
    init_scale: float = 8.0
    calm: int = 3


class Words(plugins.Section):
    count: int = 5


class Toy:
    name = "toy"

    class section(plugins.Section):
        vocab_size: int
        seq_len: int = 4
        depth: int = 1


plugins.register_optimizer("lion", Lion, lambda beta, sign, **rest: megamix.AdamW(betas=(beta, 0.9), **rest))
plugins.register_loss_scale("steady", Steady, lambda init_scale, calm: megamix.StaticLossScale(init_scale))
plugins.register_family(Toy)
plugins.register_source("words", Words, print)
plugins.register_tracker("notes", Words, print)
plugins.register_reader(".xyz", print)
"""
NAMED = {"plugins": ["toy_plugin"]}
LION = {"optimizer": {"lr": 1e-3, "name": "lion", "lion": {"sign": True}}}
pytestmark = pytest.mark.usefixtures("doors")


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The working folder, with a plugin."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "toy_plugin.py").write_text(PLUGIN)
    return tmp_path


def with_plugin(**sections):
    return changed(**sections) | NAMED


def test_a_name_that_is_taken_is_refused_with_both_modules(here):
    import_plugins(["toy_plugin"])
    with pytest.raises(ValueError, match="optimizer 'adamw' of tests.test_plugins: megamix[.a-z_]+ has registered"):
        register_optimizer("adamw", Section, test_a_name_that_is_taken_is_refused_with_both_modules)
    with pytest.raises(ValueError, match=r"reader '.xyz' of builtins: builtins has registered one of that name"):
        register_reader(".xyz", print)
    assert OPTIMIZERS.sections.keys() == {"adamw", "nag", "muon", "lion"}
    assert READERS.registered[".xyz"] is print


def test_the_working_folder_matters_to_plugins_alone(here, monkeypatch, capsys):
    import_plugins([])
    assert str(here) not in sys.path
    import_plugins(["toy_plugin"])
    assert sys.path[-1] == str(here)
    (here / "gone").mkdir()
    monkeypatch.chdir(here / "gone")
    os.rmdir(here / "gone")
    assert main(["config", "--schema"]) == 0
    assert main(["config", "--schema", "--plugins", "other_plugin"]) == 2
    assert "plugins: other_plugin cannot be imported: FileNotFoundError" in capsys.readouterr().err


class Routing(Section):
    """A table of its own."""

    experts: int


class RoutedConfig(ModelConfig):
    """A family's that begins with another one's keys."""

    routing: Routing


def _family(name, section):
    family = type(name.title(), (Transformer,), {"name": name, "section": section})
    register_family(family)
    return family


def test_a_family_is_found_by_its_name_and_one_made_by_hand_by_its_section():
    families = {
        "child": _family("child", RoutedConfig),
        "parent": _family("parent", type("ParentConfig", (ModelConfig,), {})),
        "same": _family("same", ModelConfig),
        "transformer": Transformer,
    }
    for name, family in families.items():
        routing = {"routing": {"experts": 2}} if name == "child" else {}
        assert family_of(config_from_dict(changed(model={"family": name} | routing)).model) is family, name
    sizes = {"vocab_size": 8, "seq_len": 4, "hidden_size": 4, "num_layers": 1, "num_heads": 1}
    assert family_of(RoutedConfig(**sizes, routing=Routing(experts=1))) is families["child"]
    assert family_of(ModelConfig(**sizes)) is Transformer


def test_a_table_of_a_family_is_compared_as_a_whole():
    _family("routed", RoutedConfig)

    def record(experts):
        config = config_from_dict(changed(model={"family": "routed", "routing": {"experts": experts}}))
        return RunRecord(config=config.text, fingerprints={}, rng_rule="")

    saved = SimpleNamespace(run=record(2), weights_only=False)
    assert changes(Path("x"), saved, record(2), own=True) == ([], [])
    with pytest.raises(ConfigError, match=r"model.routing: the checkpoint has \{ experts = 2 \}, the configuration"):
        changes(Path("x"), saved, record(3), own=True)


def test_what_a_saved_configuration_says_holds_over_a_plugin_s_defaults(here):
    shown = config_from_dict(changed(precision={"dtype": "fp16"})).text
    rule = 'rule = "steady"\ninit_scale = 16777216.0\n'  # dynamic's default, and not this rule's
    saved = re.sub(r"(?<=\[precision.loss_scale\]\n)(.+\n)*", rule, shown)
    base = _write(here, "config.toml", saved.replace("plugins = []", 'plugins = ["toy_plugin"]'))
    config = load_config(_write(here, "job.toml", f'plugins = ["toy_plugin"]\nbase = "{base.name}"\n'))
    assert dict(config.precision.loss_scale) == {"rule": "steady", "init_scale": 2.0**24, "calm": 3}


def test_a_plugin_that_the_flag_alone_names_is_refused(here, capsys):
    job = _write(here, "job.toml", config_from_dict(changed()).text.replace(": not set", ""))
    for verb in (["train", str(job), "--check"], ["verify", str(job)]):
        assert main([*verb, "--plugins", "toy_plugin", "precision.loss_scale.rule=steady"]) == 2
        said = capsys.readouterr().err
        assert 'plugins: toy_plugin named by --plugins alone; write plugins = ["toy_plugin"] on top of' in said


def test_keys_of_a_plugin_have_their_defaults_and_mistakes_like_all_others(here):
    config = config_from_dict(with_plugin(**LION))
    shown = config.text
    assert shown.startswith('plugins = ["toy_plugin"]\n')
    assert "[optimizer.lion]\nbeta = 0.9\nsign = true\n" in shown
    assert "adamw" not in shown
    assert load_config(_write(here, "job.toml", shown), []) == config  # which is imported already
    assert problems_of(with_plugin(optimizer={"name": "lion", "lion": {"bta": 1, "beta": 2.0}})) == (
        "optimizer.lion.bta: unknown key, got 1; did you mean optimizer.lion.beta?",
        "optimizer.lion.beta: got 2.0, must be less than 1; write for example beta = 0.9",
        "optimizer.lion.sign: missing; write for example sign = true",
    )
    assert problems_of(with_plugin(optimizer={"lion": {"sign": False}})) == (
        'optimizer.lion: got { sign = false }, which is not read where optimizer.name = "adamw"; '
        'write optimizer.name = "lion", or leave lion out',
    )
    assert problems_of(with_plugin(optimizer={"name": "lions"})) == (
        "optimizer.name: got \"lions\", must be 'adamw', 'nag', 'muon' or 'lion'; write name = \"lion\"",
    )


def test_each_kind_has_its_place_in_the_configuration_and_its_schema(here):
    config = config_from_dict(
        with_plugin(
            precision={"loss_scale": {"rule": "steady"}},
            data={"train": [{"words": {"count": 7}, "weight": 1}, {"markov": 4, "weight": 1}]},
            metrics={"notes": {}},
        )
        | {"model": {"family": "toy", "vocab_size": 9}}
    )
    assert dict(config.precision.loss_scale) == {"rule": "steady", "init_scale": 8.0, "calm": 3}
    assert dict(config.model) == {"family": "toy", "vocab_size": 9, "seq_len": 4, "depth": 1}
    assert config.data.train[0].words.count == 7
    assert config.metrics.notes.count == 5
    assert "[metrics.notes]\ncount = 5\n" in config.text
    schema = json.dumps(config_schema())
    assert all(f'"{word}"' in schema for word in ("lion", "What it remembers.", "calm", "depth", "words", "notes"))
    (problem,) = problems_of(with_plugin(model={"depth": 3}))
    assert 'model.depth: got 3, which is not read where model.family = "transformer"' in problem
    (problem,) = problems_of(with_plugin(data={"train": [{"words": {"count": "7"}}]}))
    assert problem == 'data.train[0].words.count: got "7", must be a whole number; write for example count = 5'


def test_the_page_s_example_goes(here):
    page = (Path(__file__).parents[1] / "docs/configuration.md").read_text().partition("## Plugins")[2]
    module, toml = (page.partition(f"```{kind}\n")[2].partition("```")[0] for kind in ("python", "toml"))
    (here / "my_module.py").write_text(module)
    base = _write(here, "base.toml", config_from_dict(changed()).text.replace(": not set", ""))
    config = load_config(_write(here, "job.toml", f'base = "{base.name}"\n{toml}'))
    assert build_optimizer(config) == AdamW(lr=lrs_of(config), betas=(0.8, 0.95))


@pytest.mark.parametrize(
    ("text", "want"),
    [
        (None, "ModuleNotFoundError: No module named 'toy_plugin'; install it, or start in the folder where it lies"),
        ("1 / 0", "ZeroDivisionError: division by zero; mend that module"),
        ("import nothing_of_that_name", "No module named 'nothing_of_that_name'; mend that module"),
    ],
)
def test_an_import_that_fails_is_one_line(here, capsys, text, want):
    (here / "toy_plugin.py").unlink()
    if text is not None:
        (here / "toy_plugin.py").write_text(text)
    (problem,) = problems_of(with_plugin(**LION))
    assert problem.startswith("plugins: toy_plugin cannot be imported: ")
    assert problem.endswith(want)
    assert main(["plot", "--plugins", "toy_plugin", "run"]) == 2
    assert capsys.readouterr().err == f"megamix plot: {problem}\n"


def _started(tree):
    config = config_from_dict(tree)
    return started_with(config.values, own_code(config.plugins))


def test_ranks_with_other_sources_of_a_plugin_differ(here):
    one = _started(with_plugin(**LION))
    (here / "toy_plugin.py").write_text(PLUGIN + "\n")
    other = _started(with_plugin(**LION))
    (line,) = differences([RankGroup([0], one), RankGroup([1], other)])
    assert line.startswith("source code of toy_plugin (SHA-256): ")
    without = _started(changed())
    said = differences([RankGroup([0], one), RankGroup([1], without)])
    assert [line.split(":")[0] for line in said] == ["optimizer.name", "plugins"]


def _write(folder, name, text):
    (folder / name).write_text(text)
    return folder / name


def test_no_run_folder_and_no_checkpoint_imports_what_it_names(here, capsys):
    """Others may write to a run's folder: it names a plugin that lies in it and in the working folder."""
    run, checkpoint = here / "run", here / "run/checkpoints/step_00000002"
    job = tiny_job(here, data={"train": [{"markov": 4}], "valid": None}, steps=2, eval_interval=0)
    run_on_ranks(job)

    def name_it(fields):
        config = fields["run"]["config"].replace('name = "adamw"', 'name = "lion"')
        fields["run"]["config"] = config.replace("plugins = []", 'plugins = ["hostile"]')

    edit(checkpoint, name_it)
    (run / "config.toml").write_text(read_manifest(checkpoint / "manifest.json").run.config)
    for folder in (here, run, run / "checkpoints", checkpoint):
        (folder / "hostile.py").write_text("raise SystemExit('imported')")
    on_top = _write(here, "on_top.toml", 'base = "run/config.toml"\n')
    for words in (
        ["generate", str(run)], ["evaluate", str(checkpoint)], ["export", str(checkpoint), "--to", "hf", "out"],
        ["checkpoint", "ls", str(run)], ["checkpoint", "verify", str(checkpoint)],
        ["config", str(run / "config.toml"), "--show"], ["train", str(on_top), "--check"],
    ):  # fmt: skip
        assert main(words) == 2, words
        assert "if you trust that code, write --plugins hostile right after the verb" in capsys.readouterr().err
        assert "hostile" not in sys.modules, words
    assert main(["checkpoint", "export", str(checkpoint), "--to", "dcp", "out"]) == 0  # hands on, and asks no code
    assert "hostile" not in sys.modules
    for words in (["generate", str(run)], ["config", str(run / "config.toml"), "--show"]):
        assert main([*words, "--plugins", "hostile"]) == 2
        assert "plugins: hostile cannot be imported: SystemExit: imported; mend" in capsys.readouterr().err
    with pytest.raises(PluginError, match="plugins: hostile named by a saved file"):
        run_on_ranks(job)
    assert checkpoint.is_dir()  # none was set aside as damaged


def test_where_a_configuration_lies_says_whether_it_imports_and_not_its_text(here):
    """A run's own names nothing to import, nor does its base, whatever is written in it; a user's own does."""
    shown = config_from_dict(changed()).text
    named, steady = shown.replace("plugins = []", 'plugins = ["toy_plugin"]'), ["precision.loss_scale.rule=steady"]
    bare = re.sub("# .*\n", "", named)
    run, link = here / "run", here / "link.toml"
    for beside in ("metrics.jsonl", "checkpoints", "journal.jsonl", "status.json"):
        (run / beside).mkdir(parents=True)
        for text in (bare, named, f'base = "{run}/other.toml"\n'):
            _write(run, "other.toml", bare)
            own = _write(run, "config.toml", text)
            link.unlink(missing_ok=True)
            link.symlink_to(own)
            for path in (own, link, _write(here, "job.toml", 'base = "run/config.toml"\n')):
                with pytest.raises(ConfigError, match="plugins: toy_plugin named by a saved file"):
                    load_config(path, steady)
        (run / beside).rmdir()
    (run / "checkpoints").mkdir()
    assert "toy_plugin" not in sys.modules
    mine = bare + "# valid: not set\n"
    assert load_config(_write(here, "job.toml", mine), steady).precision.loss_scale.rule == "steady"
    assert "toy_plugin" in sys.modules
    load_config(_write(run, "mine.toml", named), steady)  # which no run writes


def test_a_run_s_folder_names_no_program_that_a_job_starts(here, capsys):
    (here / "run/checkpoints").mkdir(parents=True)
    program = config_from_dict(changed()).text + "\n[metrics.alert]\ncommand = ['touch', 'started']\n"
    own = _write(here / "run", "config.toml", program)
    for path in (own, _write(here, "job.toml", 'base = "run/config.toml"\n')):
        load_config(path)  # which starts nothing
        assert main(["train", str(path)]) == 2
        assert "config.toml names a program, and a run's folder starts none" in capsys.readouterr().err
        load_config(path, ["metrics.alert.command=['mine']"], starts=True)
    assert not (here / "started").exists()


BAD = """
from typing import Any

from pydantic import field_validator, model_validator

from megamix import plugins


class Part(plugins.Section):
    size: int = 1


class Odd(plugins.Section):
    table: dict[str, int] = {}
    parts: dict[str, Part] = {}
    kind: int | bool = 3
    pair: tuple[int, int] = (1, 2)
    part: Part | None = None
    needed: Part = Part()
    even: int = 2
    small: int = 1

    @field_validator("even")
    @classmethod
    def is_even(cls, value: int) -> int:
        if value % 2:
            raise RuntimeError("odd")
        return value

    @model_validator(mode="after")
    def fits(self) -> Any:
        if self.small > 9:
            raise ValueError("must be small")
        return self


class Rule(plugins.Section):
    init_scale: str = "a"
    min_scale: str = "c"
    max_scale: str = "b"


plugins.register_optimizer("odd", Odd, print)
plugins.register_loss_scale("odd", Rule, print)
"""


@pytest.mark.parametrize(
    ("odd", "want"),
    [
        ({"table": {"a": "x"}}, 'optimizer.odd.table.a: got "x", must be a whole number; write '),
        ({"parts": {"a": {"size": "x"}}}, 'optimizer.odd.parts.a.size: got "x", must be a whole number; write '),
        ({"parts": {"a": {"sise": 2}}}, "optimizer.odd.parts.a.sise: unknown key, got 2; "),
        ({"kind": "x"}, 'optimizer.odd.kind.int: got "x", must be a whole number; write '),
        ({"pair": (1,)}, "optimizer.odd.pair: got [1], must have 2 items; write for example pair = [1, 2]"),
        ({"part": 3}, "optimizer.odd.part: got 3, must be a table; "),
        ({"needed": 3}, "optimizer.odd.needed: got 3, must be a table; write [optimizer.odd.needed] and its keys"),
        ({"small": 10}, "optimizer.odd: got { small = 10 }, must be small; correct its keys"),
        ({"even": 3}, "its own check fails: RuntimeError: odd; correct its keys"),
    ],
)
def test_mistakes_in_a_section_of_any_form_are_lines(here, odd, want):
    (here / "toy_plugin.py").write_text(BAD)
    said = problems_of(with_plugin(optimizer={"name": "odd", "odd": odd}))
    assert any(want in line for line in said), said
    assert all(line.startswith("optimizer") for line in said)


def test_keys_of_any_form_pass_by_the_built_in_ones_checks_and_are_shown_to_be_read_back(here):
    (here / "toy_plugin.py").write_text(BAD)
    tables = {"table": {"a.b c": 1, "": 2}, "parts": {"d e.": {"size": 3}}}
    config = config_from_dict(
        with_plugin(optimizer={"name": "odd", "odd": tables}, precision={"loss_scale": {"rule": "odd"}})
    )
    assert dict(config.precision.loss_scale) == {"rule": "odd", "init_scale": "a", "min_scale": "c", "max_scale": "b"}
    assert config.optimizer.odd.table == tables["table"]
    assert load_config(_write(here, "job.toml", config.text)) == config


OWN = "means something of megamix's own there; give it another name"
NO_NAME = "a name must match "


@pytest.mark.parametrize(
    ("register", "name", "section", "build", "want"),
    [
        (register_optimizer, "lr", Section, print, f"optimizer 'lr' of builtins: lr {OWN}"),
        (register_source, "path", Section, print, f"path {OWN}"),
        (register_tracker, "log_interval", Section, print, f"log_interval {OWN}"),
        (register_loss_scale, "auto", Section, print, f"auto {OWN}"),
        (register_optimizer, "a b", Section, print, f"optimizer 'a b' of builtins: {NO_NAME}"),
        (register_optimizer, "a\n", Section, print, NO_NAME),
        (register_optimizer, "2", Section, print, NO_NAME),
        (register_optimizer, "x", dict, print, "its keys must be a subclass of megamix.plugins.Section, got"),
        (register_optimizer, "x", Section, 3, "optimizer 'x' of 3: it must be a function or a class that builds one"),
    ],
)
def test_what_cannot_be_named_or_built_is_refused(register, name, section, build, want):
    with pytest.raises(ValueError, match=re.escape(want)):
        register(name, section, build)


@pytest.mark.parametrize(("ending", "want"), [(".json.zst", OWN), ("text", r"reader 'text' of builtins: a name must")])
def test_a_reader_of_a_built_in_ending_or_of_none_is_refused(ending, want):
    with pytest.raises(ValueError, match=re.escape(want)):
        register_reader(ending, print)


def test_what_a_plugin_prints_is_not_part_of_what_is_shown(here, capsys):
    (here / "toy_plugin.py").write_text("print('hello')")
    assert main(["config", "--schema", "--plugins", "toy_plugin"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)
    assert said.err == "hello\n"


@pytest.mark.parametrize("name", ["a\nb", ""])
def test_a_name_of_no_module_is_shown_in_one_line(name, capsys):
    assert main(["config", "--schema", "--plugins", f"json,{name}"]) == 2
    assert capsys.readouterr().err == (
        f"megamix config: plugins: got {name!r}, which is no name of a module; write it as in Python's import\n"
    )


def test_the_text_under_a_key_is_its_description():
    class Base(Section):
        low: float = 0.0
        """Smallest value;
        none lies below."""
        told: float = Field(0.0, description="By pydantic.")
        """By the text."""

    class Derived(Base):
        high: float = 1.0
        """Largest value."""
        bare: float = 1.0

    found = create_model("Made", __base__=Derived, own=(int, 0)).model_json_schema()["properties"]
    assert {key: entry.get("description") for key, entry in found.items() if key != "own"} == {
        "low": "Smallest value;\nnone lies below.", "told": "By pydantic.", "high": "Largest value.", "bare": None,
    }  # fmt: skip

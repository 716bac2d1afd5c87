"""What plugins register is in the strict configuration like what is built in; only a user's word imports one."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from megamix import AdamW
from megamix.checkpoint.manifest import read_manifest
from megamix.cli import main
from megamix.config import config_from_dict, config_schema, config_to_toml, effective_tables, load_config
from megamix.plugins import (
    OPTIMIZERS,
    READERS,
    PluginError,
    Section,
    import_plugins,
    register_optimizer,
    register_reader,
)
from megamix.train.build import build_optimizer
from megamix.train.same_job import RankGroup, differences, started_with
from tests.checkpoint.seal import edit
from tests.test_config_errors import GOOD, Tree, changed, problems_of
from tests.test_config_moved import CHECKPOINT, now
from tests.train.jobs import run_on_ranks

PLUGIN = """
from pydantic import Field

import megamix
from megamix import plugins


class Lion(plugins.Section):
    \"\"\"Lion's.\"\"\"

    beta: float = Field(0.9, lt=1)
    \"\"\"What it remembers.\"\"\"
    sign: bool = Field(examples=[True])
    \"\"\"Required.\"\"\"


class Steady(plugins.Section):
    \"\"\"A rule's.\"\"\"

    init_scale: float = 8.0
    \"\"\"Of all steps.\"\"\"
    calm: int = 3
    \"\"\"Not dynamic's.\"\"\"


class Words(plugins.Section):
    \"\"\"A source's, and a tracker's.\"\"\"

    count: int = 5
    \"\"\"How many.\"\"\"


class Toy:
    name = "toy"

    class section(plugins.Section):
        vocab_size: int
        seq_len: int = 4
        depth: int = 1


plugins.register_optimizer("lion", Lion, lambda beta, sign, **rest: megamix.AdamW(betas=(beta, 0.9), **rest))
plugins.register_loss_scale("steady", Steady, lambda init_scale, calm: megamix.StaticLossScale(init_scale))
plugins.register_family(Toy())
plugins.register_source("words", Words, print)
plugins.register_tracker("notes", Words, print)
plugins.register_reader(".xyz", print)
"""
NAMED = {"plugins": ["toy_plugin"]}
LION = {"optimizer": {"lr": 1e-3, "name": "lion", "lion": {"sign": True}}}
pytestmark = pytest.mark.usefixtures("doors")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with a plugin."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "toy_plugin.py").write_text(PLUGIN)
    return tmp_path


def with_plugin(**sections: object) -> Tree:
    return changed(**sections) | NAMED


def test_a_name_that_is_taken_is_refused_with_both_modules(here: Path) -> None:
    import_plugins(["toy_plugin"])
    with pytest.raises(ValueError, match="optimizer 'adamw' of tests.test_plugins: megamix[.a-z_]+ has registered"):
        register_optimizer("adamw", Section, test_a_name_that_is_taken_is_refused_with_both_modules)
    with pytest.raises(ValueError, match=r"reader '.xyz' of builtins: builtins has registered one of that name"):
        register_reader(".xyz", print)
    assert OPTIMIZERS.sections.keys() == {"adamw", "nag", "lion"}
    assert READERS.registered[".xyz"] is print


def test_keys_of_a_plugin_have_their_defaults_and_mistakes_like_all_others(here: Path) -> None:
    config = config_from_dict(with_plugin(**LION))
    shown = config_to_toml(config)
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
        "optimizer.name: got \"lions\", must be 'adamw', 'nag' or 'lion'; write name = \"lion\"",
    )


def test_each_kind_has_its_place_in_the_configuration_and_its_schema(here: Path) -> None:
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
    assert "[metrics.notes]\ncount = 5\n" in config_to_toml(config)
    schema = json.dumps(config_schema())
    assert all(f'"{word}"' in schema for word in ("lion", "What it remembers.", "calm", "depth", "words", "notes"))
    (problem,) = problems_of(with_plugin(model={"depth": 3}))
    assert 'model.depth: got 3, which is not read where model.family = "transformer"' in problem
    (problem,) = problems_of(with_plugin(data={"train": [{"words": {"count": "7"}}]}))
    assert problem == 'data.train[0].words.count: got "7", must be a whole number; write count = 7'


def test_the_page_s_example_goes(here: Path) -> None:
    page = (Path(__file__).parents[1] / "docs/configuration.md").read_text().partition("## Plugins")[2]
    module, toml = (page.partition(f"```{kind}\n")[2].partition("```")[0] for kind in ("python", "toml"))
    (here / "my_module.py").write_text(module)
    base = _write(here, "base.toml", config_to_toml(config_from_dict(changed())).replace(": not set", ""))
    config = load_config(_write(here, "job.toml", f'base = "{base.name}"\n{toml}'))
    assert build_optimizer(config.optimizer, [0.1]) == AdamW(lr=[0.1], betas=(0.8, 0.95))


@pytest.mark.parametrize(
    ("text", "want"),
    [
        (None, "ModuleNotFoundError: No module named 'toy_plugin'; install it, or start in the folder where it lies"),
        ("1 / 0", "ZeroDivisionError: division by zero; mend that module"),
        ("import nothing_of_that_name", "No module named 'nothing_of_that_name'; mend that module"),
    ],
)
def test_an_import_that_fails_is_one_line(here: Path, capsys: pytest.CaptureFixture[str], text: str | None, want: str):
    (here / "toy_plugin.py").unlink()
    if text is not None:
        (here / "toy_plugin.py").write_text(text)
    (problem,) = problems_of(with_plugin(**LION))
    assert problem.startswith("plugins: toy_plugin cannot be imported: ")
    assert problem.endswith(want)
    assert main(["plot", "--plugins", "toy_plugin", "run"]) == 2
    assert capsys.readouterr().err == f"megamix plot: {problem}\n"


def test_names_of_no_modules_are_wrong_values() -> None:
    assert problems_of({**GOOD, "plugins": "x"}) == (
        'plugins: got "x", must be a list; write for example plugins = ["my_module"]',
    )
    (problem,) = problems_of({**GOOD, "plugins": [3]})
    assert problem.startswith("plugins[0]: got 3, must be text in quotes")


def test_ranks_with_other_sources_of_a_plugin_differ(here: Path) -> None:
    one = started_with(config_from_dict(with_plugin(**LION)), {})
    (here / "toy_plugin.py").write_text(PLUGIN + "\n")
    other = started_with(config_from_dict(with_plugin(**LION)), {})
    (line,) = differences([RankGroup([0], one), RankGroup([1], other)])
    assert line.startswith("source code of toy_plugin (SHA-256): ")
    without = started_with(config_from_dict(changed()), {})
    said = differences([RankGroup([0], one), RankGroup([1], without)])
    assert [line.split(":")[0] for line in said] == ["optimizer.name", "plugins"]


def _write(folder: Path, name: str, text: str) -> Path:
    (folder / name).write_text(text)
    return folder / name


@pytest.fixture
def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run folder that names a plugin, which lies in it and in the working folder, and needs it."""
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "run"
    checkpoint = shutil.copytree(CHECKPOINT, run / "checkpoints" / CHECKPOINT.name)

    def name_it(fields: Tree) -> None:
        config = fields["run"]["config"].replace('name = "adamw"', 'name = "lion"')
        fields["run"]["config"] = f'plugins = ["hostile"]\n\n{config}'

    edit(Path(checkpoint), name_it)
    (run / "config.toml").write_text(read_manifest(Path(checkpoint) / "manifest.json").run.config)
    for folder in (tmp_path, run, run / "checkpoints", Path(checkpoint)):
        (folder / "hostile.py").write_text("raise SystemExit('imported')")
    return run


def test_no_run_folder_and_no_checkpoint_imports_what_it_names(
    hostile: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = str(hostile / "checkpoints" / CHECKPOINT.name)
    own = config_to_toml(config_from_dict(changed(checkpoint={"folder": str(hostile)}))).replace(": not set", "")
    on_top = _write(hostile.parent, "on_top.toml", f'base = "{hostile / "config.toml"}"\n')
    for words in (
        ["generate", str(hostile)], ["evaluate", checkpoint], ["export", checkpoint, "--to", "hf", "out"],
        ["checkpoint", "ls", str(hostile)], ["checkpoint", "verify", checkpoint],
        ["checkpoint", "diff", checkpoint, checkpoint], ["checkpoint", "export", checkpoint, "--to", "dcp", "out"],
        ["config", str(hostile / "config.toml"), "--show"], ["train", str(on_top), "--check"],
        ["train", str(_write(hostile.parent, "own.toml", own)), "--check"],
    ):  # fmt: skip
        status = main(words)
        said = capsys.readouterr().err
        assert "hostile" not in sys.modules, words
        if words[0] != "train" or words[1] != str(hostile.parent / "own.toml"):
            assert (status, "--plugins hostile if you trust that code" in said) == (2, True), words
    assert (hostile / "checkpoints" / CHECKPOINT.name).is_dir()  # none was set aside as damaged
    for words in (["generate", str(hostile)], ["config", str(hostile / "config.toml"), "--show"]):
        with pytest.raises(SystemExit, match="imported"):
            main([*words, "--plugins", "hostile"])
    with pytest.raises(PluginError, match="plugins: hostile named by what was saved"):
        run_on_ranks(config_from_dict(now(hostile)))
    assert (hostile / "checkpoints" / CHECKPOINT.name).is_dir()
    for junk in ("[3]", '"hostile"', '["a\\nb"]'):
        with pytest.raises(ValueError, match="holds plugins that are no names of modules"):
            effective_tables(f"plugins = {junk}\n")

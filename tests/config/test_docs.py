"""The page and the schema name every key, and the page's example says what the program says; guides name keys and
metrics that are there.
"""

import json
import re
from pathlib import Path

import pytest

from megamix.cli.verbs import main
from megamix.config import (
    Config,
    ContextConfig,
    DataSource,
    ExpertConfig,
    ExpertGroups,
    ExpertsConfig,
    FirstLayers,
    FP8Config,
    LatentSizes,
    Llama3Scaling,
    PipelineConfig,
    RopeConfig,
    RopeScaling,
    TensorConfig,
    TransformersConfig,
    WindowConfig,
    YarnScaling,
    config_schema,
    other_trainers,
)
from megamix.config.choices import section_at
from megamix.config.loss_scales import LossScaleConfig
from megamix.config.model_and_data import SCALING, DataStage
from megamix.config.optimizers import OptimizerGroup, OptimizerSchedules, SettingSchedule
from megamix.config.sections import SECTIONS, AlertConfig, AverageConfig, CopyConfig, PrometheusConfig, WandbConfig
from megamix.config.toml_text import parse_value
from megamix.config.unread import READ_WHERE
from megamix.log.metrics import TAGS
from megamix.plugins import LOSS_SCALES, OPTIMIZERS
from tests.config import names

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"
TEXT = PAGE.read_text(encoding="utf-8")
TABLES = {
    **{f"[{name}]": section_at(Config, [name], {}) for name in SECTIONS},
    **{f"[optimizer.{name}]": section for name, section in OPTIMIZERS.sections.items()},
    "[precision.fp8]": FP8Config,
    "[precision.loss_scale]": LossScaleConfig,
    "[metrics.wandb]": WandbConfig,
    "[metrics.prometheus]": PrometheusConfig,
    "[metrics.alert]": AlertConfig,
    "[model.recompute]": FirstLayers,
    "[model.rope]": RopeConfig,
    "[model.rope.scaling]": RopeScaling,
    '[model.rope.scaling] with rule = "llama3"': Llama3Scaling,
    '[model.rope.scaling] with rule = "yarn"': YarnScaling,
    "[model.window]": WindowConfig,
    "[model.latent_attention]": LatentSizes,
    "[model.experts]": ExpertsConfig,
    "[model.experts.groups]": ExpertGroups,
    '[model] with family = "transformers"': TransformersConfig,
    "[training.average]": AverageConfig,
    "[parallelism.context]": ContextConfig,
    "[parallelism.expert]": ExpertConfig,
    "[parallelism.tensor]": TensorConfig,
    "[parallelism.pipeline]": PipelineConfig,
    "[checkpoint.copies]": CopyConfig,
    "[[data.train]]": DataSource,
    "[[data.stages]]": DataStage,
    "[[optimizer.groups]]": OptimizerGroup,
    "[optimizer.schedules]": OptimizerSchedules,
    "[optimizer.schedules.momentum]": SettingSchedule,
}


def rows(heading, cell=3):
    """Key -> default, as the page's table under a heading has them; `cell` 2: the type."""
    section = re.search(rf"^##+ {re.escape(heading)}$(.*?)(?=^##|\Z)", TEXT, re.MULTILINE | re.DOTALL)
    assert section, f"no heading {heading}"
    found = re.findall(r"^\| `(\w+)` \| ([^|]+) \| ([^|]+) \| [^|]+ \|$", section[1], re.MULTILINE)
    return {key: cells[cell - 2] for key, *cells in found}


def says(cell, field):
    if field.is_required():
        return cell == "required"
    if field.default is None:
        return cell == "not set"
    value = parse_value(cell.strip("`"))
    return (tuple(value) if isinstance(value, list) else value) == field.default


def is_key(name):
    """Return whether a configuration may have this key."""
    *table, last = name.split(".")
    if table == ["precision", "loss_scale"]:
        return any(last in section.model_fields for section in LOSS_SCALES.sections.values())
    if table == ["model", "rope", "scaling"]:
        return any(last in section.model_fields for section in SCALING.sections().values())
    section = section_at(Config, table, {})
    return section is not None and last in section.model_fields


KEY_HERE = re.compile(rf"\b(?:{'|'.join(SECTIONS)})(?:\.[a-z_]+)+")


def test_a_hint_names_keys_that_exist():
    for name in {**other_trainers.names()["here"], **other_trainers.names()["instead"]}:
        told = other_trainers.called_here(f"--{name.replace('_', '-')}")
        assert not any(is_key(f"{section}.{name}") for section in SECTIONS), name  # its own place says more
        assert [key for key in KEY_HERE.findall(told) if not is_key(key)] == [], name


def test_the_page_s_table_of_other_trainers_names_our_keys_as_the_hints_do():
    assert names.with_table(TEXT) == TEXT, "write it with python -m tests.config.names"
    table = TEXT.partition("| what | Megatron-LM |")[2].partition("\n\n")[0]
    rows = [line.strip(" |").split(" | ") for line in table.splitlines()[2:]]
    assert len(rows) > 30
    no_hint = {key for section in SECTIONS for key in section_at(Config, [section], {}).model_fields}
    no_hint |= {"sequence_parallel", "betas", "mode", "folder", "max_norm", "stage", "enabled"}
    for _, *theirs, here in rows:
        ours = set(KEY_HERE.findall(here))
        assert [key for key in re.findall(r"`(\w+[\w.]*\.\w+)`", here) if not is_key(key)] == []
        for name in re.findall(r"`([\w.-]+)`", " ".join(theirs)):
            name = name.rpartition(".")[2].lstrip("-").replace("-", "_")
            if name not in no_hint:
                told = other_trainers.called_here(name)
                assert "none" in here or "derived" in here or ours & set(KEY_HERE.findall(told)), name


@pytest.mark.parametrize("page", ["symptoms.md", "how_to.md"])
def test_a_guide_names_keys_and_metrics_that_are_there(page):
    text = (PAGE.parent / page).read_text(encoding="utf-8")
    keys = re.findall(rf"`((?:{'|'.join(SECTIONS)})\.(?!jsonl)[\w.]+)\b", text)
    tags = re.findall(rf"`((?:{'|'.join({tag.partition('/')[0] for tag in TAGS.values()})})/\w+)`", text)
    assert len(keys) >= 10
    assert [name for name in keys if not is_key(name)] == []
    assert {*tags} <= {*TAGS.values()}


@pytest.mark.parametrize("heading", TABLES)
def test_page_names_every_key_with_its_default(heading):
    fields = {key: field for key, field in TABLES[heading].model_fields.items() if field.default != {}}  # a table
    table = rows(heading)
    assert list(table) == list(fields)
    assert [key for key, cell in table.items() if not says(cell, fields[key])] == []


def test_page_names_every_key_of_every_loss_scale_rule_with_its_default():
    lines = TEXT[TEXT.index("| key | dynamic |") :].partition("\n\n")[0].splitlines()
    head, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    table = {key.strip("`"): dict(zip(head[1:-1], cells, strict=False)) for key, *cells in rows}
    for rule, section in LOSS_SCALES.sections.items():
        fields = {key: field for key, field in section.model_fields.items() if key != "rule"}
        told = {key: cells[rule] for key, cells in table.items() if cells.get(rule)}
        assert told.keys() == fields.keys(), rule
        for key, cell in told.items():
            power = re.fullmatch(r"2\*\*(\d+)", cell)
            assert says(str(2 ** int(power[1])) if power else cell, fields[key]), (rule, key)


def test_example_of_mistakes_on_the_page_is_real(capsys, monkeypatch):
    monkeypatch.chdir(PAGE.parents[1])
    pattern = r"^\$ megamix (config .*)\n(megamix .*\n(?:  .+\n)+)```"
    examples = re.findall(pattern, TEXT, re.MULTILINE)
    assert examples
    for command, said in examples:
        assert main(command.split()) == 2
        assert capsys.readouterr().err == said


def test_page_lists_the_keys_that_are_not_always_read_and_what_is_said_of_a_dropped_one(capsys, monkeypatch):
    section = TEXT.partition("## Keys that are not read\n")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| (`[^|]+) \|", section, re.MULTILINE)
    table = [key for cell in cells for key in re.findall(r"`([\w.]+)`", cell)]
    assert sorted(table) == sorted(READ_WHERE)
    monkeypatch.chdir(PAGE.parents[1])
    example = re.search(r"^\$ megamix (config .*)\n((?:# .+\n)+)```", section, re.MULTILINE)
    assert example
    assert main(example[1].split()) == 0
    assert capsys.readouterr().out.startswith(example[2] + "plugins = []\n\n[model]\n")


def tables_in(schema):
    """Every table of a schema, those within others too."""
    if isinstance(schema, dict) and "properties" in schema:
        yield schema
    for inner in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else []:
        yield from tables_in(inner)


def test_page_names_every_choice_of_a_key():
    keys = {table["title"]: table["properties"] for table in tables_in(config_schema())}
    named = {
        (heading, key, choice): choice in cell
        for heading, section in TABLES.items()
        if section is not LossScaleConfig  # whose rules the schema has instead
        for key, cell in rows(heading, cell=2).items()
        for choice in keys[section.__name__].get(key, {}).get("enum", ())
    }
    assert len(named) > 50
    assert [which for which, there in named.items() if not there] == []


def test_schema_describes_every_key_and_lets_a_file_leave_keys_to_its_base():
    schema = json.loads(json.dumps(config_schema()))
    assert set(schema["properties"]) == {"base", "plugins", *SECTIONS}
    tables = list(tables_in(schema))
    of_rules = {section.__name__ for section in LOSS_SCALES.sections.values()}
    classes = {section.__name__ for section in TABLES.values()} - {"LossScaleConfig"}
    assert {table["title"] for table in tables} == classes | of_rules | {"Config"}
    for table in tables:
        assert table["additionalProperties"] is False
        for key, entry in table["properties"].items():
            assert "description" in entry or "$ref" in entry or table is schema, f"{table['title']}.{key}"
    required = {table["title"] for table in tables if "required" in table}
    assert required == {"DataStage", "OptimizerGroup"}

"""The page and the schema name every key, and the page's example says what the program says; guides name keys and
metrics that are there.
"""

import json
import re
from pathlib import Path

import pytest

from megamix.cli import main
from megamix.config import (
    Config,
    DataSource,
    ExpertsConfig,
    FirstLayers,
    FP8Config,
    LatentSizes,
    RopeScaling,
    TransformersConfig,
    config_schema,
)
from megamix.config.choices import section_at
from megamix.config.loss_scales import LossScaleConfig
from megamix.config.model_and_data import DataStage
from megamix.config.optimizers import OptimizerGroup, OptimizerSchedules, SettingSchedule
from megamix.config.sections import SECTIONS, AlertConfig, AverageConfig, PrometheusConfig, WandbConfig
from megamix.config.toml_text import parse_value
from megamix.config.unread import READ_WHERE
from megamix.plugins import LOSS_SCALES, OPTIMIZERS
from megamix.report.metrics import TAGS
from tests.config import names

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"
TABLES = {
    **{f"[{name}]": section_at(Config, [name], {}) for name in SECTIONS},
    **{f"[optimizer.{name}]": section for name, section in OPTIMIZERS.sections.items()},
    "[precision.fp8]": FP8Config,
    "[precision.loss_scale]": LossScaleConfig,
    "[metrics.wandb]": WandbConfig,
    "[metrics.prometheus]": PrometheusConfig,
    "[metrics.alert]": AlertConfig,
    "[model.recompute]": FirstLayers,
    "[model.rope_scaling]": RopeScaling,
    "[model.latent_attention]": LatentSizes,
    "[model.experts]": ExpertsConfig,
    '[model] with family = "transformers"': TransformersConfig,
    "[training.average]": AverageConfig,
    "[[data.train]]": DataSource,
    "[[data.stages]]": DataStage,
    "[[optimizer.groups]]": OptimizerGroup,
    "[optimizer.schedules]": OptimizerSchedules,
    "[optimizer.schedules.momentum]": SettingSchedule,
}


def rows(heading, cell=3):
    """Key -> default, as the page's table under a heading has them; `cell` 2: the type."""
    text = PAGE.read_text(encoding="utf-8")
    section = re.search(rf"^##+ {re.escape(heading)}$(.*?)(?=^##|\Z)", text, re.MULTILINE | re.DOTALL)
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


def test_the_table_of_other_libraries_names_keys_that_are_there():
    text = PAGE.read_text(encoding="utf-8")
    section = text.split("## From Megatron-LM, DeepSpeed and torchtitan\n")[1].partition("\n## ")[0]
    ours = re.findall(r"\| ([^|]+) \|$", section, re.MULTILINE)
    named = re.findall(r"`(\w+[\w.]*\.\w+)`", " ".join(ours))
    assert len(named) >= 30
    there = {f"{heading.strip('[]')}.{key}" for heading, table in TABLES.items() for key in table.model_fields}
    assert [key for key in named if key not in there] == []


def test_the_page_has_every_name_of_other_trainers():
    page = PAGE.read_text(encoding="utf-8")
    assert page == names.with_table(page), "write it with python -m tests.config.names"


@pytest.mark.parametrize("page", ["symptoms.md", "how_to.md"])
def test_a_guide_names_keys_and_metrics_that_are_there(page):
    text = (PAGE.parent / page).read_text(encoding="utf-8")
    keys = re.findall(rf"`((?:{'|'.join(SECTIONS)})\.(?!jsonl)[\w.]+)\b", text)
    tags = re.findall(rf"`((?:{'|'.join({tag.partition('/')[0] for tag in TAGS.values()})})/\w+)`", text)
    assert len(keys) >= 10
    there = {f"{heading.strip('[]')}.{key}" for heading, table in TABLES.items() for key in table.model_fields}
    rules = {f"precision.loss_scale.{key}" for section in LOSS_SCALES.sections.values() for key in section.model_fields}
    assert [name for name in (*keys, *tags) if name not in there | rules | {*TAGS.values()}] == []


@pytest.mark.parametrize("heading", TABLES)
def test_page_names_every_key_with_its_default(heading):
    fields = {key: field for key, field in TABLES[heading].model_fields.items() if field.default != {}}  # a table
    table = rows(heading)
    assert list(table) == list(fields)
    assert [key for key, cell in table.items() if not says(cell, fields[key])] == []


def test_page_names_every_key_of_every_loss_scale_rule_with_its_default():
    text = PAGE.read_text(encoding="utf-8")
    lines = text[text.index("| key | dynamic |") :].partition("\n\n")[0].splitlines()
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
    examples = re.findall(pattern, PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert examples
    for command, said in examples:
        assert main(command.split()) == 2
        assert capsys.readouterr().err == said


def test_page_lists_the_keys_that_are_not_always_read_and_what_is_said_of_a_dropped_one(capsys, monkeypatch):
    section = PAGE.read_text(encoding="utf-8").partition("## Keys that are not read\n")[2].partition("\n## ")[0]
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


def test_schema_describes_every_key():
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


def test_schema_lets_a_file_leave_keys_to_its_base():
    schema = config_schema()
    required = {table["title"] for table in tables_in(schema) if "required" in table}
    assert required == {"DataStage", "OptimizerGroup", "RopeScaling"}

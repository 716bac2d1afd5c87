"""The page and the schema name every key, and the page's example says what the program says; guides name keys and
metrics that are there.
"""

import json
import re

import pytest

from megamix.cli.verbs import main
from megamix.config import Config, config_schema, other_trainers
from megamix.config.choices import section_at
from megamix.config.loss_scales import LossScaleConfig
from megamix.config.model_and_data import SCALING
from megamix.config.sections import SECTIONS
from megamix.config.unread import READ_WHERE
from megamix.log.metrics import TAGS
from megamix.plugins import LOSS_SCALES
from tests.config import names, reference
from tests.config.reference import PAGE, TABLES, tables_in

TEXT = PAGE.read_text(encoding="utf-8")


def is_key(name):
    """Return whether a configuration may have this key."""
    *table, last = name.split(".")
    if table == ["precision", "loss_scale"]:
        return any(last in section.model_fields for section in LOSS_SCALES.sections.values())
    if table == ["model", "rope", "scaling"]:
        return any(last in section.model_fields for section in SCALING.sections().values())
    section = section_at(Config, table, {})
    return section is not None and last in section.model_fields


KEY_HERE = re.compile(rf"\b(?:{'|'.join(SECTIONS)})(?:\.[a-z_0-9]+)+")


def test_a_hint_names_keys_that_exist():
    for name in {**other_trainers.names()["here"], **other_trainers.names()["instead"]}:
        told = other_trainers.called_here(f"--{name.replace('_', '-')}")
        assert not any(is_key(f"{section}.{name}") for section in SECTIONS), name  # its own place says more
        assert [key for key in KEY_HERE.findall(told) if not is_key(key)] == [], name


def test_the_page_s_last_table_has_the_names_that_no_other_has():
    text = names.PAGE.read_text(encoding="utf-8")
    assert names.with_table(text) == text, "write it with python -m tests.config.names"
    told = {names.last_name(name) for name in re.findall(r"`([\w.-]+)`", text)}
    assert {*other_trainers.names()["here"], *other_trainers.names()["instead"]} <= told


def test_the_page_s_tables_of_other_trainers_name_our_keys_as_the_hints_do():
    tables = names.PAGE.read_text(encoding="utf-8").partition(names.HEADER)[0]
    rows = re.findall(r"^\| (.*?) \| (.*?) \|$", tables, flags=re.MULTILINE)
    rows = [row for row in rows if row[1] != "here"]
    assert len(rows) > 80
    no_hint = {key for section in SECTIONS for key in section_at(Config, [section], {}).model_fields}
    no_hint |= {"sequence_parallel", "betas", "mode", "folder", "max_norm", "stage", "enabled"}
    for theirs, here in rows:
        ours = set(KEY_HERE.findall(here))
        assert [key for key in re.findall(r"`(\w+[\w.]*\.\w+)`", here) if not is_key(key)] == []
        for name in re.findall(r"`([\w.-]+)`", theirs):
            name = names.last_name(name)
            if name not in no_hint:
                told = other_trainers.called_here(name)
                assert "none" in here or "derived" in here or ours & set(KEY_HERE.findall(told)), name


@pytest.mark.parametrize("page", ["symptoms.md", "memory.md", "change_a_run.md"])
def test_a_guide_names_keys_and_metrics_that_are_there(page):
    text = (PAGE.parent / page).read_text(encoding="utf-8")
    keys = re.findall(rf"`((?:{'|'.join(SECTIONS)})\.(?!jsonl)[\w.]+)\b", text)
    tags = re.findall(rf"`((?:{'|'.join({tag.partition('/')[0] for tag in TAGS.values()})})/\w+)`", text)
    assert len(keys) >= 10
    assert [name for name in keys if not is_key(name)] == []
    assert {*tags} <= {*TAGS.values()}


def test_the_page_has_the_keys_as_the_sections_have_them():
    assert reference.with_keys(TEXT) == TEXT, "write it with python -m tests.config.reference"


@pytest.mark.parametrize("heading", TABLES)
def test_the_page_has_a_line_or_a_heading_for_each_key_of_a_table(heading):
    below = {name: part for name, _, part in (part.partition("\n") for part in TEXT.split("\n### "))}
    section = TABLES[heading]
    text = "".join(below[name] for name, other in TABLES.items() if issubclass(section, other))
    told = {*re.findall(r"^- `(\w+)", text, re.MULTILINE)}
    kinds = LOSS_SCALES.sections.values() if section is LossScaleConfig else [section]
    keys = {key for kind in kinds for key in kind.model_fields}
    assert [key for key in keys - told if f"{heading[:-1]}.{key}]" not in TABLES and key not in SECTIONS] == []


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


def test_the_page_names_every_choice_of_a_key():
    choices = {
        (table["title"], key, choice)
        for table in tables_in(config_schema())
        for key, entry in table["properties"].items()
        for choice in entry.get("enum", ())
    }
    assert len(choices) > 50
    assert [which for which in choices if f'"{which[-1]}"' not in TEXT] == []


def test_schema_describes_every_key_and_lets_a_file_leave_keys_to_its_base():
    schema = json.loads(json.dumps(config_schema()))
    assert set(schema["properties"]) == {"base", "plugins", *SECTIONS}
    tables = list(tables_in(schema))
    of_rules = {section.__name__ for section in LOSS_SCALES.sections.values()}
    classes = {section.__name__ for section in TABLES.values()} - {"LossScaleConfig"}
    assert {table["title"] for table in tables} == classes | of_rules
    for table in tables:
        assert table["additionalProperties"] is False
        for key, entry in table["properties"].items():
            assert "description" in entry or "$ref" in entry or table is schema, f"{table['title']}.{key}"
    required = {table["title"] for table in tables if "required" in table}
    assert required == {"DataStage", "OptimizerGroup"}

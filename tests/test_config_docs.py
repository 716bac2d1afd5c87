"""The page and the schema name every key, and the page's example says what the program says."""

import json
import re
from pathlib import Path

import pytest
from pydantic.fields import FieldInfo

from megamix.cli import main
from megamix.config import DataSource, RopeScaling, config_schema
from megamix.config.model_and_data import DataStage
from megamix.config.sections import SECTIONS, OptimizerGroup
from megamix.config.toml_text import parse_value
from megamix.config.unread import READ_WHERE

PAGE = Path(__file__).parents[1] / "docs" / "configuration.md"
TABLES = {
    **{f"[{name}]": model for name, model in SECTIONS.items()},
    "[model.rope_scaling]": RopeScaling,
    "[[data.train]]": DataSource,
    "[[data.stages]]": DataStage,
    "[[optimizer.groups]]": OptimizerGroup,
}


def rows(heading: str) -> dict[str, str]:
    """Key -> default, as the page's table under a heading has them."""
    text = PAGE.read_text(encoding="utf-8")
    section = re.search(rf"^##+ {re.escape(heading)}$(.*?)(?=^##|\Z)", text, re.MULTILINE | re.DOTALL)
    assert section, f"no heading {heading}"
    found = re.findall(r"^\| `(\w+)` \| [^|]+ \| ([^|]+) \| [^|]+ \|$", section[1], re.MULTILINE)
    return dict(found)


def says(cell: str, field: FieldInfo) -> bool:
    if field.is_required():
        return cell == "required"
    if field.default is None:
        return cell == "not set"
    value = parse_value(cell.strip("`"))
    return (tuple(value) if isinstance(value, list) else value) == field.default


@pytest.mark.parametrize("heading", TABLES)
def test_page_names_every_key_with_its_default(heading: str) -> None:
    fields = TABLES[heading].model_fields
    table = rows(heading)
    assert list(table) == list(fields)
    assert [key for key, cell in table.items() if not says(cell, fields[key])] == []


def test_example_of_mistakes_on_the_page_is_real(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(PAGE.parents[1])
    example = re.search(
        r"^\$ megamix (config .*)\n(megamix .*\n(?:  .+\n)+)```", PAGE.read_text(encoding="utf-8"), re.MULTILINE
    )
    assert example
    assert main(example[1].split()) == 2
    assert capsys.readouterr().err == example[2]


def test_page_lists_the_keys_that_are_not_always_read_and_what_is_said_of_a_dropped_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    section = PAGE.read_text(encoding="utf-8").partition("## Keys that are not read\n")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| (`[^|]+) \|", section, re.MULTILINE)
    table = [key for cell in cells for key in re.findall(r"`([\w.]+)`", cell)]
    assert sorted(table) == sorted(READ_WHERE)
    monkeypatch.chdir(PAGE.parents[1])
    example = re.search(r"^\$ megamix (config .*)\n((?:# .+\n)+)```", section, re.MULTILINE)
    assert example
    assert main(example[1].split()) == 0
    assert capsys.readouterr().out.startswith(example[2] + "[model]\n")


def test_schema_describes_every_key() -> None:
    schema = json.loads(json.dumps(config_schema()))
    assert set(schema["properties"]) == {"base", *SECTIONS}
    tables = schema["$defs"]
    assert len(tables) == len(TABLES)
    for name, table in tables.items():
        assert table["additionalProperties"] is False
        for key, entry in table["properties"].items():
            assert entry.get("description"), f"{name}.{key}"


def test_schema_lets_a_file_leave_keys_to_its_base() -> None:
    schema = config_schema()
    required = {name for name, table in [("", schema), *schema["$defs"].items()] if "required" in table}
    assert required == {"DataStage", "OptimizerGroup", "RopeScaling"}

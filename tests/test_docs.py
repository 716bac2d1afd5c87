"""All paths, links, tests, stages and tags that the pages under docs/ name exist."""

import ast
import dataclasses
import re
from pathlib import Path

import pytest

import megamix
from megamix.report.metrics import TAGS, LayerPrecision

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
ALL_PAGES = [*PAGES, *sorted(ROOT.glob("*.md"))]


def _text(page):
    return (DOCS / page).read_text(encoding="utf-8")


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md", ROOT / "AGENTS.md"], ids=lambda page: page.stem)
def test_every_path_on_a_page_exists(page):
    paths = re.findall(r"\b(?:megamix|tests|docs|launch|configs)/[\w./-]*\w", page.read_text(encoding="utf-8"))
    assert [path for path in paths if not (ROOT / path).exists()] == []


def _anchors(page):
    """Return the anchors of a page's headings, as GitHub and the site make them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", ALL_PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_link_on_a_page_leads_to_a_file_and_a_heading(page):
    links = re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)", page.read_text(encoding="utf-8"))
    local = [(page.parent / target if target else page, anchor) for target, anchor in links if "://" not in target]
    assert [str(target) for target, _ in local if not target.exists()] == []
    assert [f"{target}#{anchor}" for target, anchor in local if anchor and anchor not in _anchors(target)] == []


def test_the_api_page_has_what_the_package_exports():
    table, _, reference = _text("api.md").partition("\n## ")
    cells = re.findall(r"^\| (`.*?`) \| ", table, flags=re.MULTILINE)
    told = [name.removeprefix("megamix.") for cell in cells for name in re.findall(r"`([\w.]+)`", cell)]
    shown = re.findall(r"^::: megamix\.(\w+)$", reference, flags=re.MULTILINE)
    own = {*megamix.__all__, "plugins"}  # which a configuration names, and no program needs torch for
    assert sorted(told) == sorted(shown) == sorted(own)
    assert all(hasattr(megamix, name) for name in megamix.__all__)


def test_the_page_of_promises_names_each_room_and_is_a_page():
    page = _text("testing.md")
    rooms = {path.parent.relative_to(ROOT).as_posix() for path in (ROOT / "tests").glob("*/**/test_*.py")}
    assert [
        room for room in rooms if not re.search(rf"`({'|'.join([room, *map(str, Path(room).parents)][:-2])})[/`]", page)
    ] == []
    assert len(page.split()) <= 1000


def test_the_log_s_table_has_exactly_the_tags_that_are_written():
    tags = re.findall(r"^\| [^|`]+ \| `([^`]+)` \| ", _text("operations.md"), flags=re.MULTILINE)
    assert sorted(tags) == sorted(TAGS.values())


def test_the_tags_in_the_text_are_written_too():
    rooms = "|".join(sorted({tag.partition("/")[0] for tag in TAGS.values()}))
    named = re.findall(rf"`((?:{rooms})/\w+)`", _text("operations.md"))
    assert set(named) == set(TAGS.values())


def test_the_tags_of_an_examined_step_are_those_that_are_written():
    named = re.findall(r"^\| `precision/(\w+)/LAYER` \| ", _text("operations.md"), flags=re.MULTILINE)
    assert named == [field.name for field in dataclasses.fields(LayerPrecision)]


def test_every_stage_of_a_step_is_a_file():
    table = _text("design.md").partition("### The stages and their files")[2].partition("\n### ")[0]
    cells = re.findall(r"^\| [^|]+ \| ((?:`\w+`(?:, )?)+) \|", table, flags=re.MULTILINE)
    named = [name for cell in cells for name in re.findall(r"`(\w+)`", cell)]
    assert len(named) >= 10
    room = ROOT / "megamix/mixed_precision"
    assert [name for name in named if not (room / f"{name}.py").is_file()] == []


ROOMS = sorted(path.parent for path in (ROOT / "megamix").glob("*/**/__init__.py"))


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: room.relative_to(ROOT).as_posix())
def test_a_room_lists_its_files_and_rooms(room):
    docstring = ast.get_docstring(ast.parse((room / "__init__.py").read_text(encoding="utf-8"))) or ""
    listed = re.findall(r"^(\w+)  +\S", docstring, flags=re.MULTILINE)
    rooms = {path.parent.name for path in room.glob("*/__init__.py")}
    files = {path.stem for path in room.glob("*.py")} - {"__init__"}
    assert sorted(listed) == sorted(files | rooms)

"""All paths, links, stages, tags, commands and flags that the pages name exist. The site of docs/ is built without a
network, with every page, in the tiers of the index; strictly, so that a dead link or an unknown name fails the build.
"""

import ast
import dataclasses
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import megamix
from megamix.cli.verbs import VERBS, main
from megamix.log.metrics import TAGS, LayerPrecision

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
    assert [
        f"{target}#{anchor}"
        for target, anchor in local
        if target.suffix == ".md" and anchor and anchor not in _anchors(target)
    ] == []


def test_the_api_page_has_what_the_package_exports():
    table, _, reference = _text("api.md").partition("\n## ")
    cells = re.findall(r"^\| (`.*?`) \| ", table, flags=re.MULTILINE)
    told = [name.removeprefix("megamix.") for cell in cells for name in re.findall(r"`([\w.]+)`", cell)]
    shown = re.findall(r"^::: megamix\.(\w+)$", reference, flags=re.MULTILINE)
    own = {*megamix.__all__, "plugins"}  # which a configuration names, and no program needs torch for
    assert sorted(told) == sorted(shown) == sorted(own)
    assert all(hasattr(megamix, name) for name in megamix.__all__)


def test_pages_can_be_read():
    words = {page: len(page.read_text(encoding="utf-8").split()) for page in [*PAGES, ROOT / "README.md"]}
    assert [page for page, count in words.items() if count < 250 or count > 5000] == []
    assert words[DOCS / "design.md"] <= 4000
    tables = [*DOCS.glob("*.csv"), *DOCS.glob("studies/figures/*.txt")]
    assert sum(words.values()) + sum(len(path.read_text(encoding="utf-8").split()) for path in tables) <= 59_100


def test_the_page_of_promises_names_each_room_and_is_a_page():
    page = _text("testing.md")
    rooms = {path.parent.relative_to(ROOT).as_posix() for path in (ROOT / "tests").glob("*/**/test_*.py")}
    assert [
        room for room in rooms if not re.search(rf"`({'|'.join([room, *map(str, Path(room).parents)][:-2])})[/`]", page)
    ] == []
    assert len(page.split()) <= 1000


def test_the_log_s_table_has_exactly_the_tags_that_are_written_and_the_text_no_other():
    tags = re.findall(r"^\| [^|`]+ \| `([^`]+)` \| ", _text("watch.md"), flags=re.MULTILINE)
    assert sorted(tags) == sorted(TAGS.values())
    rooms = "|".join(sorted({tag.partition("/")[0] for tag in TAGS.values()}))
    named = re.findall(rf"`((?:{rooms})/\w+)`", _text("watch.md"))
    assert set(named) == set(TAGS.values())
    named = re.findall(r"^\| `precision/(\w+)/LAYER` \| ", _text("watch.md"), flags=re.MULTILINE)
    assert named == [field.name for field in dataclasses.fields(LayerPrecision)]


def test_every_stage_of_a_step_is_a_file():
    table = _text("design.md").partition("### The stages and their files")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| [^|]+ \| ((?:`\w+`(?:, )?)+) \|", table, flags=re.MULTILINE)
    named = [name for cell in cells for name in re.findall(r"`(\w+)`", cell)]
    assert len(named) >= 10
    room = ROOT / "megamix/mixed_precision"
    assert [name for name in named if not [*room.rglob(f"{name}.py")]] == []


def test_the_table_by_megatron_s_stages_names_files_and_tests_that_are_there_and_what_they_define():
    table = _text("design.md").partition("## By Megatron-LM's stages")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")][1:]
    assert len(rows) >= 25
    for what, ours, files, tests in rows:
        paths = [ROOT / name for name in re.findall(r"`([^`]+)`", files)]
        proven = [ROOT / name for name in re.findall(r"`([^`]+)`", tests)]
        assert all(path.is_file() for path in [*paths, *proven]), what
        assert len(paths) <= 3, what
        texts = [path.read_text(encoding="utf-8") for path in paths]
        for name in re.findall(r"`([\w.]+)`", ours):
            home, _, last = name.rpartition(".")
            defined = rf"(?:def|class) {last}\b" if home else rf"(?:def|class) {last}\b|^{last}\b(?: =|:)"
            there = [text.partition(f"class {home}")[2] if home else text for text in texts]
            assert any(re.search(defined, text, flags=re.MULTILINE) for text in there), (what, name)


ROOMS = sorted(path.parent for path in (ROOT / "megamix").glob("*/**/__init__.py"))


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: room.relative_to(ROOT).as_posix())
def test_a_room_lists_its_files_and_rooms(room):
    docstring = ast.get_docstring(ast.parse((room / "__init__.py").read_text(encoding="utf-8"))) or ""
    listed = re.findall(r"^(\w+)  +\S", docstring, flags=re.MULTILINE)
    rooms = {path.parent.name for path in room.glob("*/__init__.py")}
    files = {path.stem for path in room.glob("*.py")} - {"__init__"}
    assert sorted(listed) == sorted(files | rooms)
    assert {*re.findall(r"Begin\s+with\s+`(\w+)`", docstring)} <= {*listed}
    assert "import" in docstring.partition("Begin")[0] or not listed, "what may it import, and where does one begin?"


def pages(nav):
    """Return the pages of a navigation, depth first."""
    found = []
    for entry in nav:
        for held in entry.values():
            found += [held] if isinstance(held, str) else pages(held)
    return found


def test_every_page_is_in_the_navigation_once():
    nav = tomllib.loads((ROOT / "zensical.toml").read_text(encoding="utf-8"))["project"]["nav"]
    assert sorted(pages(nav)) == sorted(str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md"))


def test_the_index_has_the_tiers_of_the_navigation_with_all_their_pages():
    _, *tiers = tomllib.loads((ROOT / "zensical.toml").read_text(encoding="utf-8"))["project"]["nav"]
    _, *sections = (ROOT / "docs/index.md").read_text(encoding="utf-8").split("\n## ")
    assert [section.partition("\n")[0] for section in sections] == [title for tier in tiers for title in tier]
    for tier, section in zip(tiers, sections, strict=True):
        linked = set(re.findall(r"\]\(([\w/]+\.md)", section))
        assert [page for page in pages([tier]) if page not in linked] == []


def build(folder):
    command = [sys.executable, "-m", "zensical", "build", "--strict"]
    nowhere = {"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}
    return subprocess.run(command, cwd=folder, env=os.environ | nowhere, capture_output=True, text=True, check=False)


def test_the_site_is_built_without_a_network(tmp_path):
    pytest.importorskip("zensical")
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    shutil.copy(ROOT / "zensical.toml", tmp_path)
    (tmp_path / "megamix").symlink_to(ROOT / "megamix")
    built = build(tmp_path)
    assert built.returncode == 0, built.stdout + built.stderr
    api = (tmp_path / "site/api/index.html").read_text(encoding="utf-8")
    assert 'id="megamix.ShardedEngine.step"' in api
    assert "<link href=http" not in api.replace('"', "")


COMMAND_PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES]
VERB = "|".join(verb.name for verb in VERBS)
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)
COMMAND = re.compile(rf"(?:\$ )?(?:[A-Z_]+=\S+ )*(?:torchrun .* -m )?megamix ((?:{VERB})(?: .*)?)")
WORDS = re.compile(rf"megamix ({VERB})\b(?!:)(.*)", flags=re.DOTALL)


def block_commands(text):
    """Return what stands behind `megamix` in each command of a page's blocks, fenced or indented."""
    blocks = [block for language, block in FENCED.findall(text) if language not in ("python", "toml")]
    lines = "\n".join(blocks).splitlines() + re.findall(r"^    (\S.*)$", FENCED.sub("", text), flags=re.MULTILINE)
    return [found[1] for line in lines if (found := COMMAND.fullmatch(line))]


def arguments(command):
    """Return a command's words: of a synopsis with all that is optional, the first alternative, and 1 for a letter."""
    words = shlex.split(re.sub(r"[][]", "", command), comments=True)
    return ["1" if re.fullmatch("[A-Z]", word) else word.partition("|")[0] for word in words]


@pytest.mark.parametrize(
    "command", sorted({command for page in COMMAND_PAGES for command in block_commands(page.read_text("utf-8"))})
)
def test_a_command_in_a_block_parses(command):
    assert main(arguments(command), run=lambda _: 0) == 0


def named_flags(text):
    """Return verb and flag of each flag in a page's text that stands behind its verb in one piece of code."""
    spans = re.findall(r"`([^`]+)`", FENCED.sub("", text))
    found = [match for span in spans if (match := WORDS.match(" ".join(span.split())))]
    return [(match[1], flag) for match in found for flag in re.findall(r"(?<!\S)\[?(--[\w-]+)", match[2])]


@pytest.mark.parametrize("page", COMMAND_PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_flag_that_the_text_names_exists(page, capsys):
    for verb, flag in named_flags(page.read_text(encoding="utf-8")):
        action = ["export"] if verb == "checkpoint" else []  # the only one with flags
        with pytest.raises(SystemExit):
            main([verb, *action, "--help"])
        assert re.search(rf"(?<![\w-]){flag}(?![\w-])", capsys.readouterr().out), f"megamix {verb} {flag}"

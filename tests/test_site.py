"""The site of docs/ is built without a network, with every page, in the tiers of the index; strictly, so that a dead
link or an unknown name of the API fails the build.
"""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


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

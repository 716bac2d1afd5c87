"""The README's example runs as printed, its audit prints what it shows, everything that it names exists, and it stays
short.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megamix.cli import main
from tests.programs import no_compiler

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_the_library_example_learns() -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    torch.manual_seed(0)
    scope: dict[str, Any] = {}
    with no_compiler():
        exec(example, scope)  # the promise is that a reader can paste it
    assert float(scope["loss"]) < 4.5  # ln(256) is 5.55
    assert not bool(scope["result"].found_inf)


def test_the_audit_says_what_is_shown(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    (shown,) = re.findall(r"^```\n(update .*?)```$", README, flags=re.MULTILINE | re.DOTALL)
    assert main(["audit", "--", sys.executable, "docs/examples/wrong/half_weights.py"]) == 1
    said = capsys.readouterr().out.replace(sys.executable, "python")
    assert _without_digits(said) == _without_digits(shown)


def _without_digits(page: str) -> str:
    return " ".join(re.sub(r"\d+", "0", page).split())


def test_it_takes_no_longer_than_seven_minutes_to_read() -> None:
    assert len(README.split()) <= 1500


def test_every_linked_page_exists() -> None:
    for page in re.findall(r"\]\(([\w/]+\.md)\)", README):
        assert (ROOT / page).is_file(), page

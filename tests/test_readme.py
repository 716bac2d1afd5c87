"""The README's example runs as it stands, and what it names exists."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

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


def test_every_linked_page_exists() -> None:
    for page in re.findall(r"\]\(([\w/]+\.md)\)", README):
        assert (ROOT / page).is_file(), page

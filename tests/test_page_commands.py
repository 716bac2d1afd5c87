"""Every `megamix VERB` in a block of the pages is accepted as printed, and every flag that their text names exists."""

import re
import shlex
from pathlib import Path

import pytest

from megamix.cli import VERBS, main

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
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
    "command", sorted({command for page in PAGES for command in block_commands(page.read_text(encoding="utf-8"))})
)
def test_a_command_in_a_block_parses(command):
    assert main(arguments(command), run=lambda _: 0) == 0


def named_flags(text):
    """Return verb and flag of each flag in a page's text that stands behind its verb in one piece of code."""
    spans = re.findall(r"`([^`]+)`", FENCED.sub("", text))
    found = [match for span in spans if (match := WORDS.match(" ".join(span.split())))]
    return [(match[1], flag) for match in found for flag in re.findall(r"(?<!\S)\[?(--[\w-]+)", match[2])]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_flag_that_the_text_names_exists(page, capsys):
    for verb, flag in named_flags(page.read_text(encoding="utf-8")):
        action = ["export"] if verb == "checkpoint" else []  # the only one with flags
        with pytest.raises(SystemExit):
            main([verb, *action, "--help"])
        assert re.search(rf"(?<![\w-]){flag}(?![\w-])", capsys.readouterr().out), f"megamix {verb} {flag}"


PLANTED = """
```
megamix plan a.toml --word 2    # ranks
```

    RANKS=1 megamix train a.toml b=1 --chek

`megamix plan
--wide` and `megamix bench [--round N]`
"""


def test_planted_mistakes_are_found():
    plan, train = block_commands(PLANTED)
    assert arguments(plan) == ["plan", "a.toml", "--word", "2"]
    assert arguments(train) == ["train", "a.toml", "b=1", "--chek"]
    assert named_flags(PLANTED) == [("plan", "--wide"), ("bench", "--round")]
    for command in (plan, train):
        with pytest.raises(SystemExit):
            main(arguments(command), run=lambda _: 0)

"""The README: its first block trains; its diff from DDP gives the same losses in FP32; its audit, log and plan print
what it shows; it stays short.
"""

import re
import sys
from pathlib import Path

import pytest
import run_pictures
import torch
import torch.distributed as dist
import torch.nn.functional as F

import megamix
from megamix.cli.verbs import main
from tests.programs import no_compiler

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def shown(before, language="text"):
    """Return the first block of a language behind a text."""
    return re.findall(rf"^```{language}\n(.*?)^```$", README.partition(before)[2], re.MULTILINE | re.DOTALL)[0]


def test_a_line_and_a_picture_stand_before_the_first_block_which_trains():
    before, _, block = README.partition("```\n")
    headings = [line for line in before.splitlines() if line.startswith("#")]
    assert headings == ["# megamix", "## Train in three commands"]
    assert before.count("![") == 1
    assert len(re.sub(r"!\[.*?\]\(.*?\)", "", before).split()) < 40
    clone, train, page = block.partition("```")[0].splitlines()
    assert clone.startswith("git clone ")
    assert train.split("#")[0].strip() == "./launch/quickstart.sh"
    assert page.split("#")[0].strip() == ".venv/bin/megamix report runs/quickstart --open"


def test_the_log_and_the_text_are_those_of_the_run_in_the_picture():
    said = iter(line for _, line in run_pictures.console())
    log = shown("## Train").splitlines()
    sample = shown(log[-1]).splitlines()
    assert len(log) == len(sample) == 4
    assert [line for line in (*log, *sample) if line not in said] == []  # an iterator: in their order


DIFF = shown("## Your own loop", "diff")


def test_from_ddp_eight_lines_change():
    assert sum(line[0] in "+-" for line in DIFF.splitlines()) == 8


def _losses(sign):
    """Train by the lines of one side of the diff, in FP32, and return the losses of this rank."""
    lines = [line[1:] for line in DIFF.splitlines() if line[0] in (" ", sign)]
    code = "\n".join([*lines, "    losses.append(loss.item())"]).replace("bfloat16", "float32")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 4))
    random = torch.Generator().manual_seed(dist.get_rank())
    batches = [(torch.randn(8, 16, generator=random), torch.randint(4, (8,), generator=random)) for _ in range(20)]
    scope = {"model": model, "batches": batches, "losses": [], "F": F, "torch": torch}
    scope |= {"megamix": megamix, "DistributedDataParallel": torch.nn.parallel.DistributedDataParallel}
    with no_compiler():
        exec(code, scope)
    return scope["losses"]


def test_both_sides_of_the_diff_have_the_same_losses_in_fp32(run_ranks):
    before, after = run_ranks(_losses, 2, "-"), run_ranks(_losses, 2, "+")
    for one, other in zip(before, after, strict=True):
        assert len(one) == 20
        assert other == pytest.approx(one, rel=1e-6)


def _without_digits(line):
    return " ".join(re.sub(r"\d+", "0", line).split())


def test_the_audit_says_what_is_shown(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert main(["audit", "--", sys.executable, "docs/examples/wrong/half_weights.py"]) == 1
    said = capsys.readouterr().out.replace(sys.executable, "python")
    lines = [_without_digits(line) for line in said.splitlines()]
    for line in shown("megamix audit").splitlines():
        assert any(told.startswith(_without_digits(line)) for told in lines), line


def test_the_plan_s_rows_are_those_that_it_prints(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    (command,) = re.findall(r"^megamix (plan .*?)  +#", README, re.MULTILINE)
    assert main(command.split()) == 0
    said = capsys.readouterr().out.splitlines()
    rows = shown("megamix plan").splitlines()
    assert len(rows) == 4
    assert said[:4] == rows


def test_it_takes_no_longer_than_six_minutes_to_read():
    assert len(README.split()) <= 1300
    assert "<details" not in README

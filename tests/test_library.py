"""A DDP and an FSDP2 script print the same losses, digit for digit, as what docs/library.md makes of them; every block
of the page and every program of docs/examples runs and learns; a checkpoint goes from two ranks to one.
"""

import contextlib
import io
import re
import runpy
from collections import Counter
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.programs import no_compiler

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "docs/examples"
PAGE = (ROOT / "docs/library.md").read_text(encoding="utf-8")
SECTIONS = {"from_ddp": "From DistributedDataParallel", "from_fsdp2": "From FSDP2"}


def _printed(program, folder):
    """Output of a program that is started in `folder`, on ranks if any are given."""
    world = {"init_process_group": lambda *_: None, "destroy_process_group": lambda: None}
    with (
        contextlib.chdir(folder), no_compiler(), mock.patch.multiple(dist, **world),
        contextlib.redirect_stdout(io.StringIO()) as printed,
    ):  # fmt: skip
        runpy.run_path(str(program), run_name="__main__")
    return printed.getvalue()


def _losses(printed):
    return [float(loss) for loss in re.findall(r"loss ([\d.]+)", printed)]


@pytest.mark.parametrize("folder", SECTIONS)
def test_a_script_prints_the_same_losses_before_and_after(folder, run_ranks, tmp_path):
    before, after = (run_ranks(_printed, 2, EXAMPLES / folder / f"{name}.py", tmp_path) for name in ("before", "after"))
    assert before == after
    losses = _losses(before[0])
    assert len(losses) >= 16
    assert losses[15] < losses[0] / 2


def _code(path):
    """The lines behind its docstring, without imports."""
    lines = path.read_text(encoding="utf-8").split('"""', 2)[2].splitlines()
    return [line for line in lines if line and not line.startswith(("import ", "from "))]


def _is_within(lines, whole):
    """Whether the lines stand there in their order."""
    rest = iter(whole)
    return all(line in rest for line in lines)


@pytest.mark.parametrize("folder", SECTIONS)
def test_the_page_shows_each_line_that_changes(folder):
    before, after = _code(EXAMPLES / folder / "before.py"), _code(EXAMPLES / folder / "after.py")
    section = PAGE.split(f"## {SECTIONS[folder]}\n")[1].partition("\n## ")[0]
    changed = "".join(re.findall(r"^```diff\n(.*?)^```$", section, flags=re.MULTILINE | re.DOTALL)).splitlines()
    gone, new = ([line[1:] for line in changed if line[0] == sign] for sign in "-+")
    assert Counter(before) - Counter(gone) + Counter(new) == Counter(after)
    assert _is_within(gone, before)
    assert _is_within(new, after)


def _run_blocks(folder, *titles):
    """Run the page's blocks in order, in `folder`; all, or those of some sections. Returns the names after each
    section.
    """
    scope = {}
    after = {}
    with contextlib.chdir(folder), no_compiler(), contextlib.redirect_stdout(io.StringIO()):
        for section in PAGE.split("\n## ")[1:]:
            title, _, text = section.partition("\n")
            if not titles or title in titles:
                for block in re.findall(r"^```python\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL):
                    exec(block, scope)  # the promise is that a reader can paste it
                after[title] = dict(scope)
    return after


def _page(folder):
    """On each rank: some numbers of the page, how far averages are from weights, and the weights that were saved."""
    torch.manual_seed(0)
    after = _run_blocks(folder)
    units = after["Units"]
    units["train"](units["engine"], steps=1)
    if dist.get_rank() == 0:  # alone, as the page says of evaluation
        units["model"](torch.arange(4))
    units["train"](units["engine"], steps=1)
    mean, model = (after["An average of the weights"][name] for name in ("mean", "model"))
    pairs = zip(mean.module.parameters(), model.parameters(), strict=True)
    gaps = [float((mean - weight).abs().max()) for mean, weight in pairs if mean.dtype == torch.float32]
    numbers = [
        float(after["Learning rates"]["result"].lr),
        float(after["Accumulation"]["engine"].applied_updates),
        float(after["Evaluation"]["held_out"]),
    ]
    return numbers, gaps, after["Checkpoints"]["engine"].full_weights()


def test_every_block_runs_on_two_ranks_and_one_goes_on_from_their_checkpoint(run_ranks, tmp_path):
    for (lr, updates, held_out), gaps, _ in (answers := run_ranks(_page, 2, tmp_path)):
        assert lr == pytest.approx(1e-2 / 2)  # after ten updates
        assert updates == 1
        assert held_out < 4.5  # ln(64) is 4.16
        assert len(gaps) == 3, "all averages are FP32"
        assert 0 < min(gaps) <= max(gaps) < 0.05  # five updates of at most 0.01 each
    after = _run_blocks(tmp_path, "The loop", "Checkpoints")["Checkpoints"]
    assert after["progress"] == {"step": 20}
    assert int(after["engine"].applied_updates) == 20
    alone = after["engine"].full_weights()
    for _, _, saved in answers:
        assert saved.keys() == alone.keys()
        assert all(torch.equal(saved[name], alone[name]) for name in alone)


@pytest.mark.parametrize("program", sorted(path.stem for path in EXAMPLES.glob("*.py")))
def test_an_example_prints_a_loss_that_falls(program, run_ranks, tmp_path):
    path = EXAMPLES / f"{program}.py"
    printed = run_ranks(_printed, 2, path, tmp_path)[0] if program == "step" else _printed(path, tmp_path)
    losses = _losses(printed)
    assert losses[-1] < 0.8 * losses[0], printed


def test_the_page_lists_every_example():
    listed = re.findall(r"^\| \[(\w+)\.py\]", PAGE, flags=re.MULTILINE)
    assert sorted(listed) == sorted(path.stem for path in EXAMPLES.glob("*.py"))


def test_the_page_s_scheduler_goes_on_with_its_rate_after_a_load(tmp_path):
    rates = [
        float(_run_blocks(tmp_path, "The loop", "Learning rates")["Learning rates"]["result"].lr) for _ in range(2)
    ]
    assert rates == pytest.approx([1e-2 * 0.5, 1e-2 * 0.5**3])  # of step 20, and of step 40

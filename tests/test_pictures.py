"""The pictures and the console on the pages are those that the scripts draw and a run prints today, and none is
missing; a timetable, a block's way and its matrices are complete.
"""

import inspect
import re
from collections import Counter
from pathlib import Path

import parallelism_pictures as pictures
import pytest
import run_pictures
import step_picture
from examples import step

from megamix.base.console import COLUMNS
from megamix.parallel.pipeline_parallel import SCHEDULES

ROOT = Path(__file__).parents[1]


def test_the_pages_have_every_picture():
    pages = ((ROOT / f"docs/{name}.md").read_text(encoding="utf-8") for name in ("parallelism", "watch"))
    shown = [sorted(re.findall(r"\]\(pictures/(\w+)\.png\)", page)) for page in pages]
    assert shown == [sorted(pictures.ALL), sorted(run_pictures.PICTURES)]
    assert {path.stem for path in pictures.PICTURES.iterdir()} == {*pictures.ALL, *run_pictures.PICTURES, "step"}


def test_the_pictures_are_those_that_the_scripts_draw(tmp_path):
    matplotlib = pytest.importorskip("matplotlib")
    pin = re.search(r"^matplotlib==(\S+)$", (ROOT / "constraints.txt").read_text(), flags=re.MULTILINE)
    pictures.write(tmp_path)
    run_pictures.draw(tmp_path)
    step_picture.write(tmp_path / "step.svg")
    for name in (*(f"{name}.png" for name in (*pictures.ALL, *run_pictures.PICTURES)), "step.svg"):
        drawn = (tmp_path / name).read_bytes()
        assert drawn.startswith((b"\x89PNG", b"<?xml"))
        if pin and matplotlib.__version__ == pin[1]:  # another one draws letters a little differently
            assert drawn == (pictures.PICTURES / name).read_bytes(), name


def test_the_drawing_of_a_step_has_the_engine_s_stages_in_its_order_and_dtypes():
    observed = step_picture.observed_step()
    assert observed.order == [*step_picture.STAGES]
    assert observed[1:] == ("FP16", "FP16", "FP32", "FP32")
    owners = [bucket.num_shards for bucket in step_picture.layout().buckets]
    assert owners == [step_picture.RANKS] * len(owners)


def test_the_drawing_and_the_readme_point_into_the_plain_step_line_by_line():
    plain = [*(stage.plain for stage in step_picture.STAGES.values()), step.update_loss_scale]
    told = re.findall(r"\]\(docs/examples/step\.py#L(\d+)\)", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert [int(line) for line in told] == [function.__code__.co_firstlineno for function in plain]
    phases = re.findall(r"(\w+)\(", inspect.getsource(step.train_step).partition('"""')[2].partition('"""')[2])
    assert phases == [function.__name__ for function in plain]


@pytest.mark.parametrize("name", run_pictures.PAGES)
def test_the_console_on_a_page_is_what_a_run_prints_today(name):
    page = (ROOT / "docs" / name).read_text(encoding="utf-8")
    assert page == run_pictures.with_console(page, run_pictures.PAGES[name]), "write it: python docs/run_pictures.py"
    shown = page.partition(run_pictures.MARK)[2].partition("```")[0].splitlines()
    assert len(shown) > 10
    assert max(map(len, shown)) <= COLUMNS


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_timetable_has_all_of_a_step_and_no_rank_does_two_things_at_once(name):
    slots = pictures.timetable(name)
    stages = 4 if name == "1f1b" else 8
    done = Counter((slot.stage, slot.micro_batch, kind) for slot in slots for kind in slot.kind.replace("B", "IW"))
    assert done == Counter((stage, number, kind) for stage in range(stages) for number in range(8) for kind in "FIW")
    for rank in range(4):
        own = sorted((slot for slot in slots if slot.rank == rank), key=lambda slot: slot.start)
        assert sum(slot.seconds for slot in own) == 8 * 3.0  # forward 1, backward 2
        assert all(one.start + one.seconds <= other.start for one, other in zip(own, own[1:], strict=False))
    ends = {(slot.stage, slot.kind, slot.micro_batch): slot.start + slot.seconds for slot in slots}
    for slot in slots:
        if slot.kind == "F" and slot.stage:
            assert ends[slot.stage - 1, "F", slot.micro_batch] <= slot.start


def test_each_schedule_waits_less_than_the_simpler_ones():
    waits = {name: pictures.bubble(pictures.timetable(name)) for name in SCHEDULES}
    assert waits["1f1b"] == pytest.approx(3 / 11)  # (p - 1) / (m + p - 1), Narayanan et al. 2021
    assert waits["interleaved_1f1b"] < waits["1f1b"]
    assert max(waits["interleaved_zero_bubble"], waits["zbv_zero_bubble"]) < waits["interleaved_1f1b"]


def test_a_block_on_the_picture_gathers_and_sums_twice_and_no_rank_holds_all_of_a_divided_tensor():
    steps = pictures.block_shapes()
    travels = [step.split()[0] for step in steps if isinstance(step, str)]
    assert travels == ["gather", "sum,", "gather", "sum,"]
    held = {step.name.replace("\n", " "): step[1:] for step in steps if isinstance(step, pictures.Held)}
    assert held == {
        "residual stream": (0.5, 1), "norm": (0.5, 1), "attention's input": (1, 1), "heads": (1, 0.5),
        "feed-fwd input": (1, 1), "inner features": (1, 0.5),
    }  # fmt: skip


def test_blocks_on_the_picture_are_all_of_a_matrix():
    found = [*pictures.blocks()]
    for suffix, _ in pictures.MATRICES:
        own = [block for block in found if block.name.endswith(suffix)]
        full = own[0].placement.full_shape
        starts = {block.placement.offset for block in own}
        if own[0].shape == full:
            assert starts == {(0,) * len(full)}
        else:
            (dim,) = (dim for dim, size in enumerate(full) if size != own[0].shape[dim])
            assert sorted(start[dim] for start in starts) == [full[dim] // 4 * rank for rank in range(4)]

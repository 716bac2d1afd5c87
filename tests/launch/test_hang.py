"""`megamix hang` says from the ranks' records who is missing in which collective, and where ranks differ."""

import json

import pytest

from megamix.cli.verbs import main
from tests.builders import run_on_ranks, tiny_job

SUM, GATHER = "gloo:all_to_all", "gloo:all_gather"


def _write(folder, rank, *collectives):
    """Write a rank's record. `collectives`: group, number and name of each."""
    groups = {"0": "[0, 1, 2]", **({"pair": "[0, 1]"} if rank < 2 else {})}
    config = {name: {"name": name, "desc": "", "ranks": ranks} for name, ranks in groups.items()}
    keys = ("process_group", "collective_seq_id", "profiling_name")
    entries = [dict(zip(keys, ([group, ""], number, name), strict=True)) for group, number, name in collectives]
    (folder / f"collectives_rank{rank}.json").write_text(json.dumps({"pg_config": config, "entries": entries}))


def _told(folder, capsys):
    assert main(["hang", str(folder)]) == 0
    first, *rest = capsys.readouterr().out.splitlines()
    assert first == f"{folder / 'journal.jsonl'} says nothing"
    return rest


def test_ranks_that_never_came_are_named_in_their_group(tmp_path, capsys):
    # Rings overflow: the records begin at different numbers.
    _write(tmp_path, 0, ("0", 7, SUM), ("0", 8, GATHER), ("pair", 1, SUM), ("pair", 2, SUM))
    _write(tmp_path, 1, ("0", 8, GATHER), ("pair", 1, SUM))
    _write(tmp_path, 2, ("0", 7, SUM), ("0", 8, GATHER))
    told = f"rank 1 never entered collective 2 of ranks 0, 1, {SUM}, in which rank 0 waited; the last of rank 1 is 1"
    assert _told(tmp_path, capsys) == [f"{told}, {SUM}"]


def test_the_first_collective_that_differs_is_told(tmp_path, capsys):
    for rank in range(3):
        name = GATHER if rank == 1 else SUM
        _write(tmp_path, rank, ("0", 7, SUM), ("0", 8, name), ("0", 9, SUM))
    assert _told(tmp_path, capsys) == [
        f"collective 8 of ranks 0 to 2 differs: {SUM} on ranks 0, 2, {GATHER} on rank 1; these ranks ran different code"
    ]


def test_a_rank_without_a_record_and_ranks_alike_are_told(tmp_path, capsys):
    for rank in (0, 2):
        _write(tmp_path, rank, ("0", 8, SUM))
    assert _told(tmp_path, capsys) == [
        "rank 1 left no record: it was killed or stopped, or its machine is gone",
        f"ranks 0, 2 entered the same collectives, up to 8, {SUM}: see stacks_rank*.txt",
    ]


def test_a_start_of_fewer_ranks_leaves_no_record_of_ranks_that_are_no_more(tmp_path, data, capsys):
    (tmp_path / "run").mkdir()
    for rank in range(3):
        _write(tmp_path / "run", rank, ("0", 7, SUM))
    run_on_ranks(tiny_job(tmp_path, tokens=data, steps=2))
    assert main(["hang", str(tmp_path / "run")]) == 2
    assert "has no collectives_rank*.json; give the folder of a failed run on several ranks" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", '{"entries": [{"process_gro'])  # cut by a full disk
def test_what_is_no_record_is_refused_by_name(tmp_path, capsys, text):
    path = tmp_path / "collectives_rank3.json"
    path.write_text(text)
    assert main(["hang", str(tmp_path)]) == 2
    assert f"{path} is no record of torch's flight recorder" in capsys.readouterr().err

"""Reading of the ranks' last collectives after a run that ended on one rank: who is missing, and where they differ.

torch numbers the collectives of each group on each rank. The ranks of a group must enter the same ones in the same
order, so a rank with a smaller last number is the one that the others wait for. This module imports no torch.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from pickle import dump  # it writes alone: torch's analyser reads nothing else
from typing import Any

from megamix.launch.journal import JOURNAL
from megamix.launch.liveness import names
from megamix.launch.run_status import RunStatus, read_status

_SHOWN = 8  # most ranks of which a line tells the last collective

Record = dict[str, Any]  # torch's: its "entries" are collectives, its "pg_config" the groups by name


def read_records(folder: Path) -> dict[int, Record]:
    """Return the records of a run's folder by rank. Raises: ValueError if there are none, or one is no record."""
    records: dict[int, Record] = {}
    for path in folder.glob("collectives_rank*.json"):
        try:
            records[int(path.stem.removeprefix("collectives_rank"))] = json.loads(path.read_bytes())
        except ValueError as error:  # a full disk, or a kill, has cut it
            raise ValueError(f"{path} is no record of torch's flight recorder: {error!r}; remove it") from None
    if not records:
        raise ValueError(f"{folder} has no collectives_rank*.json; give the folder of a failed run on several ranks")
    return dict(sorted(records.items()))


def verdict(folder: Path, records: dict[int, Record]) -> Iterator[str]:
    """Yield a line for the run's own end, for each group whose ranks differ, and for ranks without a record."""
    last = read_status(folder)
    told = f"{last.state} at update {last.update}: {last.reason or 'no reason was written'}"
    yield told if last != RunStatus() else f"{folder / JOURNAL} says nothing"
    members = defaultdict[str, set[int]](set)
    entered = defaultdict[str, dict[int, dict[int, str]]](lambda: defaultdict(dict))
    for rank, record in records.items():
        for name, group in record["pg_config"].items():
            members[name] |= {*json.loads(group["ranks"])}
        for entry in record["entries"]:
            if not entry.get("is_p2p"):
                entered[entry["process_group"][0]][rank][entry["collective_seq_id"]] = entry["profiling_name"]
    lost = set().union(*members.values()) - {*records}
    if lost:
        yield f"{names(lost)} left no record: it was killed or stopped, or its machine is gone"
    lines = [line for name, by_rank in entered.items() for line in _of_group(members[name] - lost, by_rank)]
    ends = [record["entries"][-1] for record in records.values() if record["entries"]][:1]
    shown = "".join(f", up to {entry['collective_seq_id']}, {entry['profiling_name']}" for entry in ends)
    yield from lines or [f"{names(records)} entered the same collectives{shown}: see stacks_rank*.txt"]


def _of_group(members: set[int], by_rank: Mapping[int, dict[int, str]]) -> Iterator[str]:
    """Yield where the ranks of a group differ. `by_rank`: the names of a rank's collectives by number."""
    for number in sorted(set.intersection(*map(set, by_rank.values()))):
        ranks_by_name = defaultdict[str, list[int]](list)
        for rank in sorted(by_rank):
            ranks_by_name[by_rank[rank][number]].append(rank)
        if len(ranks_by_name) > 1:
            each = ", ".join(f"{name} on {names(ranks)}" for name, ranks in ranks_by_name.items())
            yield f"collective {number} of {names(members)} differs: {each}; these ranks ran different code"
            return
    last = {rank: max(by_rank.get(rank, {0: "none"}).items()) for rank in sorted(members)}
    top, name = max(last.values())
    behind = [rank for rank, (number, _) in last.items() if number < top]
    if behind:
        each = "; ".join(f"the last of rank {rank} is {last[rank][0]}, {last[rank][1]}" for rank in behind[:_SHOWN])
        what = f"collective {top} of {names(members)}, {name}, in which {names({*last} - {*behind})} waited"
        yield f"{names(behind)} never entered {what}; {each}"


def write_for_torchfrtrace(records: dict[int, Record], folder: Path) -> None:
    """Write the records into a new folder for torch's analyser. Raises: OSError, also if the folder exists."""
    folder.mkdir(parents=True)
    for rank, record in records.items():
        entries = [{"frames": [], "is_p2p": False} | entry for entry in record["entries"]]
        with (folder / f"collectives_rank{rank}").open("wb") as file:
            dump(record | {"entries": entries}, file)

"""The mirror of a run: what it keeps in the nodes' shared memory, and which rank keeps whose share."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from megamix.checkpoint.all_or_none import SomeRankFailed
from megamix.checkpoint.in_memory import node_of_process
from megamix.checkpoint.mirror import Mirror
from megamix.checkpoint.slots import SlotRecord, held_home, number_of_slots, records_in, remove_slot
from megamix.checkpoint.snapshot import manifest_of
from megamix.checkpoint.verify import Checkpoint
from megamix.comm.host import HostMessages
from megamix.config import ConfigError
from megamix.config.sections import CheckpointConfig
from megamix.launch.journal import began_s
from megamix.launch.leftovers import remove_stale
from megamix.mixed_precision.engine import ShardedEngine
from megamix.train.resume import Resume
from megamix.train.run import Run


def build_mirror(
    section: CheckpointConfig, engine: ShardedEngine, run: Run, resume: Resume, files: ExitStack
) -> Mirror | None:
    """Return the mirror that checkpoint.mirror asks for. Every rank must call it, after the state is loaded.

    `files`: lets the memory go for other runs to judge. Raises: ConfigError on every rank if there is no room.
    """
    if not section.mirror:
        return None
    ranks, world = run.ranks, run.ranks.topology.world
    home = files.enter_context(held_home(run.folder))
    began, start = ranks.all_or_none.first(lambda: [began_s(run.folder), run.journal.starts])
    twins = tuple(ranks.topology.replicas.ranks)
    nodes, shares = zip(*ranks.all_or_none.every(lambda: (node_of_process(), twins)), strict=True)
    takers = [_taker(nodes, rank, its) for rank, its in enumerate(shares)]
    left = list[str]()
    if nodes.index(nodes[world.rank]) == world.rank:  # the first rank of this node
        remove_stale(home)
        left = _of_earlier_starts(home, resume.start.checkpoint)
    manifest = manifest_of(engine, resume.record)
    record = SlotRecord(began=began, start=start, rank=world.rank, twins=twins, ranks=world.size, manifest=manifest)
    mirror = Mirror(engine, home, record, left)
    sizes = ranks.all_or_none.every(lambda: mirror.size)
    givers = {giver: sizes[giver] for giver, taker in enumerate(takers) if taker == world.rank}
    messages = HostMessages(world, ranks.timeout_s) if any(taker is not None for taker in takers) else None
    number = number_of_slots(async_save=section.async_save)
    try:
        ranks.all_or_none.every(lambda: mirror.make_slots(number, messages, takers[world.rank], givers))
    except SomeRankFailed as error:
        raise ConfigError([f"checkpoint.mirror: {error}"], "job") from None
    return mirror


def _taker(nodes: Sequence[str], rank: int, twins: Sequence[int]) -> int | None:
    """Return the rank on the next node that keeps this rank's share, too. None: there is one node, or another node has
    a rank with the same share.
    """
    places = list(dict.fromkeys(nodes))
    if len(places) == 1 or any(nodes[twin] != nodes[rank] for twin in twins):
        return None
    beside = [other for other, node in enumerate(nodes) if node == nodes[rank]]
    after = places[(places.index(nodes[rank]) + 1) % len(places)]
    there = [other for other, node in enumerate(nodes) if node == after]
    return there[beside.index(rank) % len(there)]


def _of_earlier_starts(home: Path, loaded: Checkpoint | None) -> list[str]:
    """Remove the slots of earlier starts on this node, but those of the instant that this start has loaded. Return the
    names of these.
    """
    run = loaded.manifest.run if loaded is not None and loaded.path == home else None
    left = [record.name for record in records_in(home) if record.manifest.run == run]
    for name in {path.stem for path in home.glob("start_*")} - {*left}:
        remove_slot(home, name)
    return left

"""Loading the newest good checkpoint into an engine with any number of ranks, any bucket size and any groups.

The bytes are verified on their way into a rank's memory: verification reads no byte a second time.
"""

import logging
import math
import secrets
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from megamix.base.clock import Clock
from megamix.base.names import first_few
from megamix.checkpoint.all_or_none import AllOrNone
from megamix.checkpoint.boxes import Box, boxes_of_range
from megamix.checkpoint.folder import DAMAGED, Files, checkpoints
from megamix.checkpoint.manifest import AVERAGE, BUFFER, DamagedCheckpoint, FileRecord, Manifest, StateSet, states_text
from megamix.checkpoint.phase import DRAWN, Phase
from megamix.checkpoint.snapshot import DTYPES, Part, buffer_parts, frozen_params, owned_parts, state_sets
from megamix.checkpoint.tensor_file import Stored, verified_chunks
from megamix.checkpoint.verify import Check, Checkpoint, read_checkpoint
from megamix.config import ConfigError
from megamix.mixed_precision.engine import ShardedEngine
from megamix.mixed_precision.weights import misfit_names

log = logging.getLogger("megamix")

_Wanted = dict[Stored, list[Part]]  # the stored boxes of one file, each with the parts that overlap it


def read_on_all(path: Path, all_or_none: AllOrNone, check: Check | None = None) -> Checkpoint:
    """Check everything but the tensors' bytes, which `load` verifies. Every rank must call it.

    Raises, on every rank: DamagedCheckpoint with the problems that any rank has found; ConfigError.
    """
    checkpoint: Checkpoint | None = None
    problems = list[str]()
    refusal = ""
    try:
        checkpoint = read_checkpoint(path, check)
    except DamagedCheckpoint as error:
        problems = error.problems
    except ConfigError as error:
        refusal = error.problems[0]
    answers = all_or_none.every(lambda: [problems, refusal])
    _agree_on([found for found, _ in answers])
    if refusals := [refused for _, refused in answers if refused]:
        raise ConfigError(refusals[:1], "job")
    assert checkpoint is not None
    return checkpoint


def newest_checkpoint(
    folder: Path, all_or_none: AllOrNone, *, before: str | None = None, check: Check | None = None
) -> Checkpoint | None:
    """Return the newest checkpoint that `read_on_all` finds good. `before`: a name; only older checkpoints are tried.
    Damaged checkpoints on the way are set aside, with a line in the log for each. Every rank must call it.

    Raises: ConfigError on every rank for a checkpoint that is whole but refused. No older checkpoint is tried then.
    """
    for name in all_or_none.first(lambda: [path.name for path in checkpoints(folder, before)]):
        try:
            return read_on_all(folder / name, all_or_none, check)
        except DamagedCheckpoint as error:
            _set_aside(folder / name, error, all_or_none)
    return None


def load_or_older(
    checkpoint: Checkpoint,
    engine: ShardedEngine,
    all_or_none: AllOrNone,
    *,
    check: Check | None = None,
) -> Checkpoint | None:
    """Load a checkpoint or, if it is damaged, the newest good one before it in its folder. Damaged checkpoints are set
    aside, with a line in the log for each. Every rank must call it.

    Returns: the checkpoint that was loaded. None: no checkpoint is good, and the engine now holds NaN, as `load` says.
    Raises: as `load`, apart from DamagedCheckpoint; ConfigError.
    """
    found: Checkpoint | None = checkpoint
    while found is not None:
        try:
            load(found, engine, all_or_none)
            break
        except DamagedCheckpoint as error:
            _set_aside(found.path, error, all_or_none)
            found = newest_checkpoint(found.path.parent, all_or_none, before=found.path.name, check=check)
    return found


def _set_aside(path: Path, reason: DamagedCheckpoint, all_or_none: AllOrNone) -> None:
    if all_or_none.rank != 0:
        return
    target = path.with_name(f"{path.name}{DAMAGED}{secrets.token_hex(4)}")
    try:
        Files.rename(path, target)
        log.warning("checkpoint refused and set aside as %s: %s", target.name, reason)
    except OSError as error:
        log.warning("checkpoint refused: %s (and not set aside: %s)", reason, error)


def load(checkpoint: Checkpoint, engine: ShardedEngine, all_or_none: AllOrNone, *, phase: Phase | None = None) -> None:
    """Set masters, optimizer states, counters, loss scale, half and frozen parameters. Every rank must call it.

    An average of the weights that the checkpoint lacks starts from its masters; one that the engine does not keep is
    dropped; the log says so.
    `phase`: what a new run may have otherwise than the checkpoint, beside another optimizer. States that the checkpoint
    lacks, or has in another dtype, become zero; the log says which. Masters that it lacks keep their first values.
    Raises: ValueError naming what does not fit the engine, by kind, before anything is changed.
    Raises: DamagedCheckpoint on every rank if one rank finds that a file is not what was written. Masters and optimizer
    states are NaN from then on, until another load succeeds.
    Raises: SomeRankFailed on every rank if one rank cannot do its part. The engine then holds a mixture of old and
    loaded state.
    """
    manifest = checkpoint.manifest
    if problems := misfits(manifest, engine, phase):
        raise ValueError(f"{checkpoint.path} does not fit this model and optimizer: " + "; ".join(problems))
    rank, size = all_or_none.rank, all_or_none.size
    try:
        wanted = partial(_saved_parts, manifest, engine, phase)
        _agree_on(all_or_none.every(lambda: fill(checkpoint, wanted(), engine.clock, rank, size)))
    except DamagedCheckpoint:
        # The engine's earlier state is lost: keeping it would double the memory, and verifying first would read every
        # byte twice. If a caller trained on without another load, nobody would notice damaged values, but NaN is
        # noticed.
        for part in owned_parts(engine):
            part.tensor.fill_(math.nan)
        raise
    if engine.average_decay is not None and not _has_average(manifest):
        engine.begin_average()
    if rank == 0:  # the lines are about the whole model
        for line in _changes(manifest, engine, phase):
            log.warning("%s", line)
    engine.applied_updates.fill_(manifest.applied_updates)
    engine.skipped_steps.fill_(manifest.skipped_steps)
    if not manifest.weights_only:
        _load_scale(manifest, engine)
    engine.publish_masters()


def _saved_parts(manifest: Manifest, engine: ShardedEngine, phase: Phase | None) -> list[Part]:
    """Return the parts of the engine's state that the checkpoint has. What it lacks of them is zero afterwards, but for
    first values of masters and their average.
    """
    common = {
        (name, state)
        for name, _, states, saved in _sets(manifest, engine, phase)
        for state, dtype in states.items()
        if saved.get(state) == dtype
    }
    parts = owned_parts(engine)
    for part in parts:
        if part.state not in DRAWN:
            part.tensor.zero_()
    return [part for part in (*parts, *buffer_parts(engine)) if (part.param, part.state) in common]


def _sets(
    manifest: Manifest, engine: ShardedEngine, phase: Phase | None
) -> Iterator[tuple[str, tuple[int, ...], StateSet, StateSet]]:
    """Yield for each parameter and buffer: name, shape, the engine's states, and the checkpoint's states, none if it
    begins anew. An average that only one of them has is left out, because it is no misfit.
    """
    kept = [param for param in manifest.params if phase is None or not phase.is_new(param.name)]
    saved = {param.name: manifest.states[param.state_set] for param in kept}
    frozen = frozen_params(engine)
    for spec, states in state_sets(engine):
        held = saved.get(spec.name, {})
        if spec.name in frozen and BUFFER in held:
            states = held  # of another number format, which is cast
        one_sided = {AVERAGE} & (states.keys() ^ held.keys())
        own, other = ({one: kept[one] for one in kept if one not in one_sided} for kept in (states, held))
        yield spec.name, spec.full_shape, own, other


def _has_average(manifest: Manifest) -> bool:
    return any(AVERAGE in states for states in manifest.states)


def _changes(manifest: Manifest, engine: ShardedEngine, phase: Phase | None) -> Iterator[str]:
    """Yield what the engine has otherwise than the checkpoint. `phase`: as in `load`."""
    counts = Counter[str]()
    for _, _, states, held in _sets(manifest, engine, phase):
        if held and not manifest.weights_only and (new := dict(states.items() - held.items())):
            counts[states_text(new)] += 1
    for states_of_some, number in counts.items():
        yield f"another optimizer's checkpoint: {states_of_some} of {number} parameters begin at zero"
    is_kept = engine.average_decay is not None
    if is_kept != _has_average(manifest) and not manifest.weights_only:
        told = "starts from the masters: the checkpoint has none" if is_kept else "is dropped: none is kept from now on"
        yield f"the average of the weights {told}"
    saved = {param.name for param in manifest.params}
    if left := [name for name in frozen_params(engine) if name not in saved]:
        yield f"frozen parameters stay as the model has them: the checkpoint has no {first_few(left, 1)}"


def _agree_on(problems: list[list[str]]) -> None:
    """Refuse the checkpoint on every rank if any rank found a problem. Raises: DamagedCheckpoint."""
    if found := dict.fromkeys(line for lines in problems for line in lines):
        raise DamagedCheckpoint(list(found))


def misfits(manifest: Manifest, engine: ShardedEngine, phase: Phase | None = None) -> list[str]:
    """Return the reasons why this checkpoint cannot become the engine's state; empty if it can."""
    sets = [*_sets(manifest, engine, phase)]
    saved, own = {param.name: param.shape for param in manifest.params}, {name: shape for name, shape, _, _ in sets}
    # A buffer that was not saved stays as it is: the module may have got it since then, and the checkpoint of an
    # imported model has no buffers.
    # A user who names what begins anew may drop modules, and with them their buffers.
    gone = {param.name for param in manifest.params if BUFFER in manifest.states[param.state_set]}
    problems = misfit_names(
        saved if phase is None else phase.fitted(saved, own),
        own,
        may_lack={name for name, _, states, _ in sets if BUFFER in states},
        may_have=gone if phase is not None and phase.begin_anew else (),
    )
    lax = phase is not None or manifest.weights_only
    other = [one for one in sets if one[3] and one[3] != one[2] and (BUFFER in one[2] or not lax)]
    if other:
        _, _, needed, held = other[0]
        problems.append(
            f"of {first_few([one[0] for one in other], 1)} it holds {states_text(held)}, the optimizer needs "
            f"{states_text(needed)}. To go on from its weights with another optimizer, load it into an engine with the "
            "optimizer that saved it, and give that engine's full_weights() to load_weights() of the new engine"
        )
    return problems


def _load_scale(manifest: Manifest, engine: ShardedEngine) -> None:
    saved = {name: torch.tensor(value, dtype=torch.float64) for name, value in manifest.loss_scale.items()}
    scale, rule = engine.loss_scale, manifest.loss_scale_rule
    dims, own_dims = ({name: value.dim() for name, value in kept.items()} for kept in (saved, scale.state_dict()))
    if dims != own_dims or rule != scale.rule:  # for example an FP16 run that gave up continues in BF16
        anew = scale.loss_scale
        log.warning("the checkpoint's loss scale has another rule (%s): the scale starts at %.10g", rule, anew)
        return
    scale.load_state_dict(saved)
    if (before := float(saved["loss_scale"])) != (now := float(scale.loss_scale)):
        log.warning("the loss scale goes on at %.10g, as the settings ask; the checkpoint has %.10g", now, before)


def fill(checkpoint: Checkpoint, parts: Sequence[Part], clock: Clock, rank: int = 0, size: int = 1) -> list[str]:
    """Fill the parts' memory, and verify every `size`-th file from number `rank` on, unless all were verified before. A
    verified file is read whole; from the other files only the parts' bytes are read. `clock.loaded` counts the bytes
    read.

    Returns: the problems, with a line for each bad file. The parts have the saved values only if no rank has found a
    problem.
    """
    wanted = defaultdict[str, _Wanted](dict)
    for part in parts:
        for stored in checkpoint.stored[part.param, part.state]:
            if part.box.intersection(stored.box):
                wanted[stored.file].setdefault(stored, []).append(part)
    if checkpoint.is_checked:
        for boxes in wanted.values():
            _fill_beside(checkpoint, boxes, clock)
        return []
    problems = []
    for number, record in enumerate(checkpoint.manifest.files):
        path = checkpoint.path / record.name
        try:
            # If as many ranks load as have saved, each rank verifies its own file and needs no other file.
            if number % size == rank:
                _fill_and_verify(path, record, wanted[record.name], clock)
            elif wanted[record.name]:
                _fill_beside(checkpoint, wanted[record.name], clock)
        except (ValueError, OSError) as error:
            problems.append(str(error))
    return problems


def _fill_and_verify(path: Path, record: FileRecord, wanted: _Wanted, clock: Clock) -> None:
    """Fill the parts from one file, read whole and in order. Raises: ValueError at the end if the bytes are not what
    was written; OSError.
    """
    to_come = deque(sorted(wanted, key=lambda stored: stored.start))
    position = 0
    for chunk in verified_chunks(path, record):
        while to_come and to_come[0].start < position + len(chunk):
            stored = to_come[0]
            _copy_from_chunk(chunk, position, stored, wanted[stored])
            if stored.end > position + len(chunk):
                break
            to_come.popleft()
        position += len(chunk)
        clock.loaded += len(chunk)


def _fill_beside(checkpoint: Checkpoint, wanted: _Wanted, clock: Clock) -> None:
    """Fill the parts from a file that another rank verifies, reading only their bytes. Raises: ValueError, OSError."""
    for stored, parts in wanted.items():
        for part in parts:
            if common := part.box.intersection(stored.box):
                common_values = checkpoint.read(stored, common)
                _copy_common(common_values, common, part)
                clock.loaded += common_values.nbytes


def _copy_from_chunk(chunk: memoryview, position: int, stored: Stored, parts: list[Part]) -> None:
    """Copy into the parts those elements of a stored box that lie in the chunk. `position`: the chunk's first byte in
    the file.
    """
    start, end = max(position, stored.start), min(position + len(chunk), stored.end)
    dtype = DTYPES[stored.dtype]
    values = torch.frombuffer(chunk, dtype=dtype, count=(end - start) // dtype.itemsize, offset=start - position)
    done, first = 0, (start - stored.start) // dtype.itemsize
    for box in boxes_of_range(first, first + values.numel(), stored.box):
        box_values = values[done : done + box.numel].view(box.size)
        done += box.numel
        for part in parts:
            _copy_common(box_values, box, part)


def _copy_common(values: Tensor, box: Box, part: Part) -> None:
    """Copy the elements that `box` and the part have in common. Shapes: values (*box.size), in the part's dtype."""
    if common := part.box.intersection(box):
        part.tensor.view(part.box.size)[common.slices_in(part.box)].copy_(values[common.slices_in(box)])

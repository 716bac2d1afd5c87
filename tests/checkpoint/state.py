"""Engines whose state is known: every element a function of parameter, state and step alone, whatever holds it."""

import functools
import zlib

import torch

from megamix import DynamicLossScale, Precision
from megamix.checkpoint.all_or_none import AllOrNone
from megamix.checkpoint.folder import Files
from megamix.checkpoint.load import load, load_or_older, newest_checkpoint
from megamix.checkpoint.manifest import RunRecord
from megamix.checkpoint.save import Saver, remove_old, save
from megamix.checkpoint.snapshot import owned_parts, take_snapshot
from megamix.comm.collectives import Collectives
from megamix.comm.topology import Axis
from tests.builders import make_engine


def fp16_engine(bucket_size=1111, optimizer=None, model=None, shard="states"):
    precision = Precision(torch.float16, loss_scale=DynamicLossScale(2.0**10))
    return make_engine(model, optimizer, precision, shard=shard, bucket_size=bucket_size)


def all_or_none_of(engine):
    return AllOrNone(engine.world, engine.device)


def alone():
    return AllOrNone(Collectives(Axis()), torch.device("cpu"))


def make_saver(folder, all_or_none, files=None):
    """Return a saver that keeps two checkpoints. A failed save raises in the thread that wrote it."""

    def failed(error):
        raise error

    return Saver(folder, 2, all_or_none, saved=lambda path: None, failed=failed, files=files)


@functools.cache
def full_value(name, state, shape, step):
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {state} {step}".encode()))
    return torch.randn(shape, generator=generator)


def wanted(engine, part, step):
    """Return the value that a part of the engine's state has at a step."""
    whole = full_value(part.param, part.state, shapes_of(engine)[part.param, part.state], step)
    return whole[part.box.slices_in(part.box.whole(whole.shape))].reshape(-1)


def fill(engine, step):
    """Give the engine the state of a step."""
    for part in owned_parts(engine):
        part.tensor.copy_(wanted(engine, part, step))
    engine.publish_masters()
    engine.applied_updates.fill_(step)
    engine.skipped_steps.fill_(step + 5)
    engine.loss_scale.loss_scale.fill_(2.0**step)
    engine.loss_scale.clean_steps.fill_(step + 7)


def differences(engine, step):
    """Return the parts of the engine's state that are not bitwise those of that step."""
    shapes = shapes_of(engine)
    wrong = [
        f"{part.state} of {part.param} at {part.box}"
        for part in owned_parts(engine)
        if not torch.equal(part.tensor, wanted(engine, part, step))
    ]
    with engine.whole_parameters():
        for name, param in engine.module.named_parameters():
            if not torch.equal(param.data, full_value(name, "master", shapes[name, "master"], step).to(param.dtype)):
                wrong.append(f"half {name}")
    scale = engine.loss_scale
    counts = [engine.applied_updates, engine.skipped_steps, scale.loss_scale, scale.clean_steps]
    if [int(value) for value in counts] != [step, step + 5, 2**step, step + 7]:
        wrong.append(f"counters and scale: {counts}")
    return wrong


def shapes_of(engine):
    """Return the full shapes, by parameter and state."""
    shapes, optimizer = {}, engine.optimizer
    for entry in engine.plan.entries.params:
        name, shape = entry.name, entry.full_shape
        shapes |= {(name, state): shape for state in ("master", *optimizer.states(name, shape))}
        shapes |= {(name, state): (length,) for state, length in optimizer.state_lengths(name, shape).items()}
    return shapes


def save_now(folder, engine, files=None, **progress):
    """Save the engine's state, on every rank. Return the checkpoint's path."""
    snapshot = take_snapshot(engine, RunRecord(progress=progress, config="[model]\n"))
    return save(folder, snapshot, all_or_none_of(engine), files)


def load_newest(folder, engine, phase=None):
    """Load the newest checkpoint of a folder, on every rank. Return it."""
    checkpoint = newest_checkpoint(folder, all_or_none_of(engine))
    load(checkpoint, engine, all_or_none_of(engine), phase=phase)
    return checkpoint


def save_steps(folder, steps, bucket_size=1111, keep=2, shard="states", optimizer=None):
    """Save the state of each step, on every rank. Return the names."""
    engine = fp16_engine(bucket_size, optimizer, shard=shard)
    names = []
    for step in steps:
        fill(engine, step)
        saved = save_now(folder, engine, consumed_samples=step)
        if engine.topology.world.rank == 0:
            remove_old(folder, keep, saved, Files())
        names.append(saved.name)
    return names


def resume(folder, bucket_size=1111):
    """Load the newest good checkpoint, on every rank. Return its step, and the wrong parts of the state."""
    (answer,) = resume_each([folder], bucket_size)
    return answer


def resume_each(folders, bucket_size=1111, shard="states", optimizer=None):
    """Do the same for several folders, one after the other into one engine."""
    engine = fp16_engine(bucket_size, optimizer, shard=shard)
    all_or_none = all_or_none_of(engine)
    answers = []
    for folder in folders:
        fill(engine, 1)  # no folder holds this step, so what a load leaves alone is seen
        checkpoint = load_or_older(newest_checkpoint(folder, all_or_none), engine, all_or_none)
        step = checkpoint.manifest.applied_updates
        assert checkpoint.manifest.run.progress == {"consumed_samples": step}
        answers.append((step, differences(engine, step)))
    return answers

"""A training that a case tampers with, and the plain loop that it must equal if nothing refuses the case."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from megamix import NAG, Sharding
from tests.builders import loss_of, make_batch, make_engine, make_model

STEPS, TAMPERED = 3, 1  # the case acts in this step


@dataclass
class Scene:
    """Holds all that a case may touch. In the plain loop `engine` is None."""

    model: Any
    engine: Any = None
    loss: Any = None
    step: int = 0
    rank: int = 0
    kept: Any = None  # by the case, from one of its calls to the next

    @property
    def weight(self):
        return self.model.blocks[0].up.weight


@dataclass(frozen=True)
class Case:
    """One way to use the library wrongly, or rightly though it looks wrong.

    `do` is called with the scene `at` that place of one step: "model" (before the engine is built), "built", "forward",
    "backward", "step" (in front of each) or "end" (of the step). `says`: what the refusal says, a pattern; None: the
    training is right, and equals the plain loop, in which `plain` is called in the place of `do`, or `do` too.
    """

    name: str
    at: str
    do: Callable[[Scene], object]
    says: str | None = None
    plain: Callable[[Scene], object] | None = None
    every_step: bool = False
    shards: tuple[str, ...] = ("states", "gradients", "parameters")


def _act(scene, case, at):
    outside = at in ("model", "built")
    if case.at == at and (outside or case.every_step or scene.step == TAMPERED):
        (case.do if scene.engine is not None or at == "model" or case.plain is None else case.plain)(scene)


def _new_scene(case, rank):
    scene = Scene(make_model(tied=False), rank=rank)
    _act(scene, case, "model")
    return scene


def _run(case, scene, called, tokens_of, backward, end):
    """Train `called` on the tokens of each step."""
    _act(scene, case, "built")
    for scene.step in range(STEPS):
        _act(scene, case, "forward")
        scene.loss = loss_of(called, tokens_of(scene.step))
        _act(scene, case, "backward")
        backward(scene.loss)
        _act(scene, case, "step")
        end()
        _act(scene, case, "end")


def train(case, shard):
    """Return the trained weights by name."""
    rank = dist.get_rank()
    scene = _new_scene(case, rank)
    model = scene.model
    units = [model.embedding, *model.blocks, model.norm, model.head] if shard == "parameters" else ()
    engine = scene.engine = make_engine(model, NAG(lr=0.1, weight_decay=0.0), sharding=Sharding(units, shard=shard))
    _run(case, scene, engine, lambda step: make_batch(step, rank, 0), engine.backward, engine.step)
    return engine.full_weights()


@cache  # it is the same with each `shard`
def train_plainly(case, world_size):
    """Do the same in one process, with torch alone."""
    scene = _new_scene(case, 0)
    model = scene.model
    params = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True)

    def tokens_of(step):
        return torch.cat([make_batch(step, rank, 0) for rank in range(world_size)])

    def end():
        optimizer.step()
        optimizer.zero_grad()

    _run(case, scene, model, tokens_of, torch.Tensor.backward, end)
    return model.state_dict()

"""A training that a case tampers with, and the plain loop that it must equal if nothing refuses the case."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from megamix import NAG, DynamicLossScale, Precision, ShardedEngine, Sharding

VOCAB, WIDTH, STEPS, TAMPERED = 32, 16, 4, 1  # the case acts in this step


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x) * self.scale


@dataclass
class Scene:
    """Holds all that a case may touch. In the plain loop `engine` is None."""

    model: Any
    engine: Any = None
    loss: Any = None
    step: int = 0
    rank: int = 0
    settings: dict[str, Any] = field(default_factory=dict)  # of the engine
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
    dtype: torch.dtype = torch.float32
    shards: tuple[str, ...] = ("states", "gradients", "parameters")


def tokens_of(step, rank):
    return torch.randint(VOCAB, (4, 8), generator=torch.Generator().manual_seed(100 * step + rank))


def loss_of(logits, tokens):
    return F.cross_entropy(logits.float().flatten(0, 1), (3 * tokens + 1).remainder(VOCAB).flatten())


def _act(scene, case, at):
    outside = at in ("model", "built")
    if case.at == at and (outside or case.every_step or scene.step == TAMPERED):
        (case.do if scene.engine is not None or at == "model" or case.plain is None else case.plain)(scene)


def _new_scene(case, rank):
    torch.manual_seed(0)
    scene = Scene(Net(), rank=rank)
    _act(scene, case, "model")
    return scene


def train(case, shard):
    """Return the trained weights by name."""
    rank = dist.get_rank()
    scene = _new_scene(case, rank)
    model = scene.model
    units = [model.embedding, *model.blocks, model.head] if shard == "parameters" else ()
    loss_scale = DynamicLossScale() if case.dtype == torch.float16 else None
    settings = {"sharding": Sharding(units=units, shard=shard), "precision": Precision(case.dtype, None, loss_scale)}
    settings |= scene.settings
    optimizer = settings.pop("optimizer", None) or NAG(lr=0.1, momentum=0.9, weight_decay=0.0)
    scene.engine = ShardedEngine(model, optimizer, compile_update=False, **settings)
    _act(scene, case, "built")
    for scene.step in range(STEPS):
        _act(scene, case, "forward")
        tokens = tokens_of(scene.step, rank)
        scene.loss = loss_of(scene.engine(tokens), tokens)
        _act(scene, case, "backward")
        scene.engine.backward(scene.loss)
        _act(scene, case, "step")
        scene.engine.step()
        _act(scene, case, "end")
    return scene.engine.full_weights()


def train_plainly(case, world_size):
    """Do the same in one process, with torch alone, in FP32."""
    scene = _new_scene(case, 0)
    model = scene.model
    params = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True)
    _act(scene, case, "built")
    for scene.step in range(STEPS):
        _act(scene, case, "forward")
        tokens = torch.cat([tokens_of(scene.step, rank) for rank in range(world_size)])
        scene.loss = loss_of(model(tokens), tokens)
        _act(scene, case, "backward")
        scene.loss.backward()
        _act(scene, case, "step")
        optimizer.step()
        optimizer.zero_grad()
        _act(scene, case, "end")
    return model.state_dict()

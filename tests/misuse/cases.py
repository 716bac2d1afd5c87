"""List what people do to a training engine, a line a case; `training.Case` says what the columns mean."""

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.optim.swa_utils import AveragedModel

from tests.builders import loss_of, make_batch
from tests.misuse.training import Case

WRITTEN = "engine.load_weights"  # in every word about weights that somebody has written
NO_MEMORY = "whole_parameters"  # with shard "parameters" a write outside of it finds nothing to write to
KEPT = ("states", "gradients")  # ranks keep the half parameters


def _nothing(scene):
    pass


def _no_grad(do):
    def run(scene):
        with torch.no_grad():
            do(scene)

    return run


def _inside(do):
    """Do it where the parameters are whole."""

    def run(scene):
        with torch.no_grad(), scene.engine.whole_parameters():
            do(scene)

    return run


def _load_other(scene):
    scene.model.load_state_dict({name: 2 * value for name, value in scene.model.state_dict().items()})


def _renormalise(scene):
    F.embedding(torch.arange(29), scene.model.embedding.weight, max_norm=0.1)


WRITES = [
    Case("clamp data", "end", lambda s: s.weight.data.clamp_(-0.01, 0.01), WRITTEN, shards=KEPT, every_step=True),
    Case("draw data anew", "end", lambda s: s.weight.data.normal_(), WRITTEN, shards=KEPT, every_step=True),
    Case("zero data before the first step", "built", lambda s: s.weight.data.zero_(), WRITTEN, shards=KEPT),
    Case("multiply lists of data", "end", lambda s: torch._foreach_mul_([p.data for p in s.model.parameters()], 0.5), WRITTEN, shards=KEPT, every_step=True),
    Case("write through NumPy", "end", lambda s: s.weight.detach().numpy().fill(0.5), WRITTEN, shards=KEPT, every_step=True),
    Case("write through a view of data", "end", lambda s: s.weight.data[0].fill_(3.0), WRITTEN, shards=KEPT, every_step=True),
    Case("copy into data", "forward", lambda s: s.weight.data.fill_(1.0), WRITTEN, shards=KEPT, every_step=True),
    Case("write data between backward and step", "step", lambda s: s.weight.data.mul_(2), WRITTEN, shards=KEPT, every_step=True),
    Case("write detached", "end", lambda s: s.weight.detach().mul_(2), WRITTEN, shards=KEPT),
    Case("scale under no_grad", "end", _no_grad(lambda s: s.weight.mul_(0.5)), WRITTEN, shards=KEPT),
    Case("initialise anew", "end", lambda s: nn.init.zeros_(s.weight), WRITTEN, shards=KEPT),
    Case("reset a module", "end", lambda s: s.model.head.reset_parameters(), WRITTEN, shards=KEPT),
    Case("load a state dict", "end", _load_other, WRITTEN, shards=KEPT),
    Case("write into a state dict", "end", _no_grad(lambda s: s.model.state_dict()["head.weight"].zero_()), WRITTEN, shards=KEPT),
    Case("assign data", "end", lambda s: setattr(s.weight, "data", torch.zeros(40, 24)), WRITTEN),
    Case("cast to half", "end", lambda s: s.model.half(), WRITTEN),
    Case("cast to double", "end", lambda s: s.model.double(), WRITTEN),
    Case("vector to parameters", "end", lambda s: nn.utils.vector_to_parameters(torch.zeros(10_000), s.model.parameters()), WRITTEN),
    Case("renormalise an embedding", "forward", _no_grad(_renormalise), WRITTEN, shards=KEPT, every_step=True),
    Case("copy an average back", "end", _no_grad(lambda s: [p.copy_(0.9 * p) for p in s.model.parameters()]), WRITTEN, shards=KEPT),
    Case("write where parameters are whole", "end", _inside(lambda s: s.weight.data.mul_(2)), WRITTEN, every_step=True),
    Case("clamp what has no memory", "end", lambda s: s.weight.data.clamp_(-1, 1), NO_MEMORY, shards=("parameters",)),
    Case("read what has no memory", "end", lambda s: s.weight.sum(), NO_MEMORY, shards=("parameters",)),
    Case("load half of the weights", "end", lambda s: s.engine.load_weights({n: 0.5 * w for n, w in s.engine.full_weights().items()}), plain=_no_grad(lambda s: [t.mul_(0.5) for t in s.model.state_dict().values()])),
]  # fmt: skip


def _old_gradient(scene):
    loss_of(scene.model, make_batch(9, 0, 0)).backward()


def _plant_gradient(scene):
    scene.weight.grad = torch.ones_like(scene.weight)


def _hook_that_drops(scene):
    scene.weight.register_post_accumulate_grad_hook(lambda param: setattr(param, "grad", None))


def _with_other_tokens(scene):
    scene.loss = scene.loss + loss_of(scene.model, make_batch(8, 0, 0))


def _keep_loss(scene):
    if scene.kept is None:
        scene.kept = scene.loss
    elif scene.step == 2:
        scene.loss = scene.kept


GRADIENTS = [
    Case("loss.backward()", "backward", lambda s: s.loss.backward(), r"engine.backward\(loss\)"),
    Case("a gradient from before the engine", "model", _old_gradient, r"has a \.grad already.*zero_grad"),
    Case("a cleared gradient from before", "model", lambda s: (_old_gradient(s), s.model.zero_grad())),
    Case("a gradient put in front of backward", "backward", _plant_gradient, r"\.grad"),
    Case("a gradient put in front of step", "step", _plant_gradient, r"\.grad"),
    Case("a gradient put after step", "end", _plant_gradient, r"\.grad"),
    Case("zero_grad of the module", "step", lambda s: s.model.zero_grad(), plain=_nothing),
    Case("a hook that doubles a gradient", "built", lambda s: s.weight.register_hook(lambda grad: 2 * grad)),
    Case("a hook that drops a gradient", "model", _hook_that_drops, "blocks.0.up.weight", shards=KEPT),
    Case("a hook that comes too late to drop one", "built", _hook_that_drops, plain=_nothing, shards=KEPT),
    Case("backward twice", "step", lambda s: s.engine.backward(s.loss), "step|second time"),
    Case("step without backward", "end", lambda s: s.engine.step(), "backward"),
    Case("a loss without a graph", "backward", lambda s: s.engine.backward(s.loss.detach()), "graph"),
    Case("a loss that is a number", "backward", lambda s: s.engine.backward(s.loss.item()), "float"),
    Case("a negative weight", "backward", lambda s: s.engine.backward(s.loss, -1.0), "weight of 0 or more"),
    Case("a loss of two forwards", "backward", _with_other_tokens, shards=KEPT),
    Case("half of the loss", "backward", lambda s: setattr(s, "loss", 0.5 * s.loss)),
    Case("the loss of an earlier step", "backward", _keep_loss, "step|modified|version|second time", every_step=True),
    Case("clip by torch", "step", lambda s: nn.utils.clip_grad_norm_(s.model.parameters(), 1e-3), plain=_nothing),
    Case("autograd.grad of a weight", "backward", lambda s: torch.autograd.grad(s.loss, [s.weight], retain_graph=True), plain=_nothing, shards=KEPT),
    Case("a step that is discarded", "step", lambda s: (s.engine.discard_step(), s.engine.backward(loss_of(s.engine, make_batch(1, s.rank, 0)))), plain=_nothing),
    Case("examine", "forward", lambda s: s.engine.examine_next_step(), plain=_nothing),
]  # fmt: skip


def _tie(scene):
    scene.model.head.weight = scene.model.embedding.weight


def _weight_norm(scene):
    parametrizations.weight_norm(scene.model.blocks[0].up)


def _compile_all(scene):
    scene.model = torch.compile(scene.model, backend="eager")


def _compile_block(scene):
    scene.model.blocks[0] = torch.compile(scene.model.blocks[0], backend="eager")


def _freeze(scene):
    scene.weight.requires_grad_(False)


def _sparse(scene):
    scene.model.embedding.sparse = True


STRUCTURE = [
    Case("tie before the build", "model", _tie),
    Case("add a module without parameters", "end", lambda s: s.model.add_module("probe", nn.Dropout(0.5))),
    Case("weight norm before the build", "model", _weight_norm, shards=KEPT),
    Case("prune after the build", "end", lambda s: prune.l1_unstructured(s.model.head, "weight", 0.5), "head.weight", shards=KEPT),
    Case("freeze before the build", "model", _freeze),
    Case("compile the whole model before the build", "model", _compile_all, shards=("states",)),
    Case("compile a block before the build", "model", _compile_block, shards=("states",)),
    Case("a sparse embedding", "model", _sparse, "sparse"),
    Case("a copy of the model is changed", "end", _no_grad(lambda s: copy.deepcopy(s.model).head.weight.zero_()), shards=KEPT),
    Case("an average of the weights", "model", lambda s: setattr(s, "kept", AveragedModel(s.model))),
]  # fmt: skip


SETTINGS = [
    Case("a rate set by hand", "end", lambda s: s.engine.set_lr(0.1), plain=_nothing),
    Case("a rate set to nonsense", "end", lambda s: s.engine.set_lr("fast"), "lr of NAG must be"),
    Case("evaluate amid a step", "step", _no_grad(lambda s: s.model(make_batch(0, 0, 0)))),
    Case("evaluate before a step", "forward", _no_grad(lambda s: s.model.eval()(make_batch(0, 0, 0))), plain=_nothing),
]  # fmt: skip

CASES = [*WRITES, *GRADIENTS, *STRUCTURE, *SETTINGS]

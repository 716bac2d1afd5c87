"""List what people do to a training engine, a line a case; `training.Case` says what the columns mean."""

import copy
import threading

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.optim.swa_utils import AveragedModel

import megamix
from megamix import AdamW, Muon, ParamGroup, Precision, Sharding
from tests.misuse.training import WIDTH, Case, loss_of, tokens_of

WRITTEN = "engine.load_weights"  # in every word about weights that somebody has written
NO_MEMORY = "whole_parameters"  # with shard "parameters" a write outside of it finds nothing to write to
KEPT = ("states", "gradients")  # ranks keep the half parameters


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
    F.embedding(torch.arange(32), scene.model.embedding.weight, max_norm=0.1)


WRITES = [
    Case("clamp data", "end", lambda s: s.weight.data.clamp_(-0.01, 0.01), WRITTEN, shards=KEPT, every_step=True),
    Case("draw data anew", "end", lambda s: s.weight.data.normal_(), WRITTEN, shards=KEPT, every_step=True),
    Case("zero data before the first step", "built", lambda s: s.weight.data.zero_(), WRITTEN, shards=KEPT),
    Case("multiply lists of data", "end", lambda s: torch._foreach_mul_([p.data for p in s.model.parameters()], 0.5), WRITTEN, shards=KEPT, every_step=True),
    Case("write through NumPy", "end", lambda s: s.weight.detach().numpy().fill(0.5), WRITTEN, shards=KEPT, every_step=True),
    Case("write through a view of data", "end", lambda s: s.weight.data[0].fill_(3.0), WRITTEN, shards=KEPT, every_step=True),
    Case("copy into data", "forward", lambda s: s.weight.data.copy_(torch.ones(2 * WIDTH, WIDTH)), WRITTEN, shards=KEPT, every_step=True),
    Case("write data between backward and step", "step", lambda s: s.weight.data.mul_(2), WRITTEN, shards=KEPT, every_step=True),
    Case("write detached", "end", lambda s: s.weight.detach().mul_(2), WRITTEN, shards=KEPT),
    Case("scale under no_grad", "end", _no_grad(lambda s: s.weight.mul_(0.5)), WRITTEN, shards=KEPT),
    Case("initialise anew", "end", lambda s: nn.init.zeros_(s.weight), WRITTEN, shards=KEPT),
    Case("reset a module", "end", lambda s: s.model.head.reset_parameters(), WRITTEN, shards=KEPT),
    Case("load a state dict", "end", _load_other, WRITTEN, shards=KEPT),
    Case("write into a state dict", "end", _no_grad(lambda s: s.model.state_dict()["head.weight"].zero_()), WRITTEN, shards=KEPT),
    Case("assign data", "end", lambda s: setattr(s.weight, "data", torch.zeros(2 * WIDTH, WIDTH)), WRITTEN),
    Case("cast to half", "end", lambda s: s.model.half(), WRITTEN),
    Case("cast to double", "end", lambda s: s.model.double(), WRITTEN),
    Case("vector to parameters", "end", lambda s: nn.utils.vector_to_parameters(torch.zeros(4000), s.model.parameters()), WRITTEN),
    Case("renormalise an embedding", "forward", _no_grad(_renormalise), WRITTEN, shards=KEPT, every_step=True),
    Case("copy an average back", "end", _no_grad(lambda s: [p.copy_(0.9 * p) for p in s.model.parameters()]), WRITTEN, shards=KEPT),
    Case("write in BF16", "end", lambda s: s.weight.data.mul_(2), WRITTEN, dtype=torch.bfloat16, shards=KEPT, every_step=True),
    Case("write where parameters are whole", "end", _inside(lambda s: s.weight.data.mul_(2)), WRITTEN, every_step=True),
    Case("initialise where parameters are whole", "end", _inside(lambda s: nn.init.zeros_(s.weight)), WRITTEN),
    Case("clamp what has no memory", "end", lambda s: s.weight.data.clamp_(-1, 1), NO_MEMORY, shards=("parameters",)),
    Case("read what has no memory", "end", lambda s: s.weight.sum(), NO_MEMORY, shards=("parameters",)),
    Case("give a load NaN", "end", lambda s: s.engine.load_weights({n: w * float("nan") for n, w in s.engine.full_weights().items()}), "finite|NaN|nan"),
    Case("give FP16 what it cannot hold", "end", lambda s: s.engine.load_weights({n: w + 1e5 for n, w in s.engine.full_weights().items()}), "65,?504", dtype=torch.float16),
    Case("load the same weights", "end", lambda s: s.engine.load_weights(s.engine.full_weights()), plain=lambda s: None),
    Case("load half of the weights", "end", lambda s: s.engine.load_weights({n: 0.5 * w for n, w in s.engine.full_weights().items()}), plain=_no_grad(lambda s: [t.mul_(0.5) for t in s.model.state_dict().values()])),
    Case("load without an entry", "end", lambda s: s.engine.load_weights({"head.bias": torch.zeros(32)}), "missing"),
]  # fmt: skip


def _old_gradient(scene):
    loss_of(scene.model(tokens_of(9, 0)), tokens_of(9, 0)).backward()


def _plant_gradient(scene):
    scene.weight.grad = torch.ones(2 * WIDTH, WIDTH)


def _backward_twice(scene):
    scene.engine.backward(scene.loss)


def _double(grad):
    return 2 * grad


def _hook_that_drops(scene):
    scene.weight.register_post_accumulate_grad_hook(lambda param: setattr(param, "grad", None))


def _with_other_tokens(scene):
    scene.loss = scene.loss + loss_of(scene.model(tokens_of(8, 0)), tokens_of(8, 0))


def _keep_loss(scene):
    if scene.kept is None:
        scene.kept = scene.loss
    elif scene.step == 2:
        scene.loss = scene.kept


GRADIENTS = [
    Case("loss.backward()", "backward", lambda s: s.loss.backward(), r"engine.backward\(loss\)"),
    Case("a gradient from before the engine", "model", _old_gradient, r"zero_grad|\.grad"),
    Case("a cleared gradient from before", "model", lambda s: (_old_gradient(s), s.model.zero_grad())),
    Case("a gradient put in front of backward", "backward", _plant_gradient, r"\.grad"),
    Case("a gradient put in front of step", "step", _plant_gradient, r"\.grad"),
    Case("a gradient put after step", "end", _plant_gradient, r"\.grad"),
    Case("zero_grad of the module", "end", lambda s: s.model.zero_grad()),
    Case("zero_grad of the engine", "end", lambda s: s.engine.zero_grad(), "nothing to clear"),
    Case("a hook that doubles a gradient", "built", lambda s: s.weight.register_hook(_double)),
    Case("a hook that drops a gradient", "model", _hook_that_drops, "blocks.0.up.weight", shards=KEPT),
    Case("a hook that comes too late to drop one", "built", _hook_that_drops, plain=lambda s: None, shards=KEPT),
    Case("backward twice", "step", _backward_twice, "step|second time"),
    Case("step without backward", "end", lambda s: s.engine.step(), "backward"),
    Case("step twice", "end", lambda s: s.engine.step(), "backward"),
    Case("a loss that is a vector", "backward", lambda s: s.engine.backward(torch.stack([s.loss, s.loss])), "one element"),
    Case("a loss without a graph", "backward", lambda s: s.engine.backward(s.loss.detach()), "graph"),
    Case("a loss that is a number", "backward", lambda s: s.engine.backward(s.loss.item()), "float"),
    Case("a negative weight", "backward", lambda s: s.engine.backward(s.loss, -1.0), "weight of 0 or more"),
    Case("a weight that is NaN", "backward", lambda s: s.engine.backward(s.loss, float("nan")), "weight of 0 or more"),
    Case("a loss of two forwards", "backward", _with_other_tokens, shards=KEPT),
    Case("half of the loss", "backward", lambda s: setattr(s, "loss", 0.5 * s.loss)),
    Case("the loss of an earlier step", "backward", _keep_loss, "step|modified|version|second time", every_step=True),
    Case("clip by torch", "step", lambda s: nn.utils.clip_grad_norm_(s.model.parameters(), 1e-3), plain=lambda s: None),
    Case("autograd.grad of a weight", "backward", lambda s: torch.autograd.grad(s.loss, [s.weight], retain_graph=True), plain=lambda s: None, shards=KEPT),
    Case("a step that is discarded", "step", lambda s: (s.engine.discard_step(), s.engine.backward(loss_of(s.engine(tokens_of(1, s.rank)), tokens_of(1, s.rank)))), plain=lambda s: None),
    Case("examine", "forward", lambda s: s.engine.examine_next_step(), plain=lambda s: None),
    Case("examine amid a step", "step", lambda s: s.engine.examine_next_step(), "before the first"),
    Case("read weights amid a step", "step", lambda s: s.engine.full_weights(), r"right after step\(\)"),
]  # fmt: skip


def _swap(scene):
    blocks = scene.model.blocks
    blocks[0], blocks[1] = blocks[1], blocks[0]


def _repeat(scene):
    scene.model.blocks[1] = scene.model.blocks[0]


def _tie(scene):
    scene.model.head.weight = scene.model.embedding.weight


def _untie(scene):
    scene.model.head.weight = nn.Parameter(torch.zeros(32, WIDTH))


def _share_elements(scene):
    scene.model.head.weight = nn.Parameter(scene.model.embedding.weight.data)


def _overlap(scene):
    rows = torch.zeros(48, WIDTH).normal_()
    scene.model.embedding.weight = nn.Parameter(rows[:32])
    scene.model.head.weight = nn.Parameter(rows[16:])


def _one_storage(scene):
    params = [*scene.model.parameters()]
    nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(params).detach().clone(), params)


def _replace_head(scene):
    scene.model.head = nn.Linear(WIDTH, 32)


def _add_parameter(scene):
    scene.model.extra = nn.Parameter(torch.ones(1))


def _wrap_block(scene):
    scene.model.blocks[1] = nn.Sequential(scene.model.blocks[1])


def _weight_norm(scene):
    parametrizations.weight_norm(scene.model.blocks[0].up)


def _compile_all(scene):
    scene.model = torch.compile(scene.model, backend="eager")


def _compile_block(scene):
    scene.model.blocks[0] = torch.compile(scene.model.blocks[0], backend="eager")


def _freeze(scene):
    scene.weight.requires_grad_(False)


def _drop_block(scene):
    del scene.model.blocks[1]


def _sparse(scene):
    scene.model.embedding.sparse = True


STRUCTURE = [
    Case("swap two blocks", "end", _swap, "blocks"),
    Case("one block twice", "end", _repeat, "blocks.1"),
    Case("tie after the build", "end", _tie, "head.weight"),
    Case("tie before the build", "model", _tie),
    Case("untie after the build", "end", _untie, "head.weight"),
    Case("two parameters of the same elements", "model", _share_elements, "(?s)embedding.weight.*head.weight|head.weight.*embedding.weight"),
    Case("two parameters that overlap", "model", _overlap, "(?s)embedding.weight.*head.weight|head.weight.*embedding.weight"),
    Case("all parameters in one storage", "model", _one_storage),
    Case("replace a module", "end", _replace_head, "head.weight"),
    Case("add a parameter", "end", _add_parameter, "extra"),
    Case("add a module without parameters", "end", lambda s: s.model.add_module("probe", nn.Dropout(0.5))),
    Case("take a parameter out", "backward", lambda s: delattr(s.model.head, "bias"), "head.bias"),
    Case("take a block out", "end", _drop_block, "blocks.1"),
    Case("wrap a block", "end", _wrap_block, "blocks.1"),
    Case("weight norm after the build", "end", _weight_norm, "blocks.0.up", shards=KEPT),
    Case("weight norm before the build", "model", _weight_norm, shards=KEPT),
    Case("prune after the build", "end", lambda s: prune.l1_unstructured(s.model.head, "weight", 0.5), "head.weight", shards=KEPT),
    Case("freeze after the build", "end", _freeze, "frozen"),
    Case("freeze before the build", "model", _freeze),
    Case("thaw after the build", "end", lambda s: s.model.head.requires_grad_(True)),
    Case("compile the whole model before the build", "model", _compile_all, shards=("states",)),
    Case("compile a block before the build", "model", _compile_block, shards=("states",)),
    Case("a sparse embedding", "model", _sparse, "sparse"),
    Case("a buffer written between steps", "end", lambda s: s.model.scale.mul_(0.5)),
    Case("a buffer replaced", "end", lambda s: setattr(s.model, "scale", torch.tensor(0.5))),
    Case("a copy of the model is changed", "end", _no_grad(lambda s: copy.deepcopy(s.model).head.weight.zero_()), shards=KEPT),
    Case("an average of the weights", "model", lambda s: setattr(s, "kept", AveragedModel(s.model))),
    Case("a second engine on the model", "end", lambda s: megamix.ShardedEngine(s.model, AdamW(lr=1.0)), "another engine"),
    Case("a copy of the engine", "end", lambda s: copy.deepcopy(s.engine), "neither copied nor pickled"),
]  # fmt: skip


def _engine(scene, *args, **settings):
    model = nn.Linear(4, 4)
    megamix.ShardedEngine(model, *(args or (AdamW(lr=1.0),)), compile_update=False, **settings)


def _on_meta(scene):
    with torch.device("meta"):
        scene.model = type(scene.model)()


def _head_of_its_own(scene):
    scene.kept = nn.Parameter(torch.zeros(()))


def _threads(scene):
    """Take the step's gradients in two threads at once."""
    failed = []
    ready = threading.Barrier(2)

    def forward_and_backward():
        try:
            ready.wait()
            tokens = tokens_of(1, scene.rank)
            scene.engine.backward(loss_of(scene.engine(tokens), tokens))
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=forward_and_backward) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    raise failed[0]


def _scheduler(scene):
    torch.optim.lr_scheduler.LambdaLR(scene.engine, lambda step: 1.0)


SETTINGS = [
    Case("torch's optimizer", "built", lambda s: _engine(s, torch.optim.AdamW(s.model.parameters())), "pass megamix.AdamW"),
    Case("a rate in the place of an optimizer", "built", lambda s: _engine(s, 3e-4), "pass megamix.AdamW"),
    Case("a dtype in the place of a precision", "built", lambda s: _engine(s, precision=torch.bfloat16), "megamix.Precision"),
    Case("FP16 without a loss scale", "built", lambda s: _engine(s, precision=Precision(torch.float16)), "DynamicLossScale"),
    Case("parameters to AdamW", "built", lambda s: AdamW(s.model.parameters(), lr=1e-3), r"AdamW\(lr="),
    Case("params= to AdamW", "built", lambda s: AdamW(params=s.model.parameters(), lr=1e-3), r"AdamW\(lr="),
    Case("a rate that is text", "built", lambda s: AdamW(lr="1e-3"), "lr of AdamW must be"),
    Case("a rate that is NaN", "built", lambda s: AdamW(lr=float("nan")), "lr of AdamW must be"),
    Case("betas of Adam that are swapped out of range", "built", lambda s: AdamW(lr=1.0, betas=(0.9, 1.5)), "betas"),
    Case("a pattern without its name", "built", lambda s: ParamGroup("*.bias"), "ParamGroup"),
    Case("momentum of a group", "built", lambda s: AdamW(lr=1.0, groups=(ParamGroup(pattern="*", momentum=0.9),)), "momentum"),
    Case("torch's groups", "built", lambda s: AdamW(lr=1.0, groups=[{"params": [], "lr": 0.1}]), "ParamGroup"),
    Case("a word that is no shard", "built", lambda s: Sharding(shard="full"), "shard of Sharding must be"),
    Case("parameters without units", "built", lambda s: Sharding(shard="parameters"), "units"),
    Case("a unit that is none of the model's", "built", lambda s: _engine(s, sharding=Sharding(units=[nn.ReLU()])), "units"),
    Case("a negative clip", "built", lambda s: _engine(s, clip_grad=-1.0), "clip_grad"),
    Case("no micro-batches", "built", lambda s: _engine(s, grad_accum_steps=0), "grad_accum_steps"),
    Case("fused rows that do not add up", "built", lambda s: _engine(s, Muon(lr=1.0, tables=[], fused={"weight": (3, 3)})), "fused"),
    Case("a model on the meta device", "model", _on_meta, "meta"),
    Case("a scheduler of the engine", "built", _scheduler, "set_lr"),
    Case("the engine's parameters", "built", lambda s: s.engine.parameters(), "engine.module.parameters"),
    Case("a rate set by hand", "end", lambda s: s.engine.set_lr(0.1), plain=lambda s: None),
    Case("a rate set to nonsense", "end", lambda s: s.engine.set_lr("fast"), "lr of NAG must be"),
    Case("evaluate amid a step", "step", _no_grad(lambda s: s.model(tokens_of(0, 0)))),
    Case("evaluate before a step", "forward", _no_grad(lambda s: s.model.eval()(tokens_of(0, 0))), plain=lambda s: None),
    Case("two threads in backward", "forward", _threads, "thread|call step\\(\\) now"),
]  # fmt: skip

CASES = [*WRITES, *GRADIENTS, *STRUCTURE, *SETTINGS]

"""One tree's side: ranks train each configuration with the engine of the tree that PYTHONPATH names, and write down the
bits. A program of its own, which `python -m tests.same_bits` starts. It uses what a user of the engine has and nothing
of its inside, so that one text drives trees of which the inside differs.

    PYTHONPATH=TREE python worker.py TREE CONFIGURATIONS ANSWERS      # lines of JSON, in and out
"""

import contextlib
import hashlib
import importlib
import json
import logging
import random
import sys
import warnings
import zlib
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import megamix


def found(*places):
    """Return what lies at the first of these places that this tree has, each `module:name`: an earlier tree has other
    rooms.
    """
    for place in places:
        module, name = place.split(":")
        with contextlib.suppress(ModuleNotFoundError):
            return getattr(importlib.import_module(f"megamix.{module}"), name)
    raise ModuleNotFoundError(f"none of {', '.join(places)} is in {megamix.__file__}")


ATTEMPTS, DEADLINE_S = 7, 180.0
VOCAB, WIDTH, LENGTH, SAMPLES, MATRICES = 28, 16, 8, 2, 2
REPLICATED = ("dp1", "dp2", "dp4")
SCALES = {
    "static": {"init_scale": 2.0**10},
    "dynamic": {"init_scale": 2.0**16, "growth_interval": 2, "hysteresis": 2},
    "headroom": {"margin": 8.0},
}
OPTIMIZERS = {
    "adamw": {},
    "nag": {},
    "muon": {},
    "adamw_bf16": {"state_dtype": "bf16", "betas": (0.9, 0.99)},  # of which one moment is rounded by chance
    "muon_bf16": {"state_dtype": "bf16"},
}
# Events in one attempt each, beside forward, backward and step.
EVENTS = (
    "overflow", "nan", "discard", "backward fails", "forward fails", "lr", "lr table", "examine", "last", "evaluate",
    "missing", "load", "publish", "stop", "wait", "look",
)  # fmt: skip
NOT_IN_PIPELINES = {"backward fails", "forward fails", "last", "missing"}


class Planted(Exception):
    """The error that a configuration's forward or backward raises on purpose."""


class Block(nn.Module):
    """A block of tests/distributed/models.py, here so that both trees train this one whatever becomes of theirs."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 40)
        self.down = nn.Linear(40, WIDTH)
        self.gain = nn.Parameter(torch.ones(1))  # smaller than the ranks are many

    def forward(self, x):
        return x + self.gain * self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """A model for ranks that hold all of it; `kind` is the configuration's `model`."""

    def __init__(self, kind):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.units = nn.ModuleList(
            Block() for _ in range(9 if kind == "deep" else 3)
        )  # of nine small ones two are joined
        self.experts = nn.Parameter(0.2 * torch.randn(MATRICES, WIDTH, WIDTH))
        self.statistics = nn.BatchNorm1d(WIDTH, affine=False) if kind == "buffers" else nn.Identity()
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        if kind == "tied":
            self.head.weight = self.embedding.weight
            self.units[2].up.weight = self.units[0].up.weight
        if kind == "frozen":
            self.units[0].down.weight.requires_grad_(False)
        self.recomputes = kind == "recompute"

    def forward(self, tokens, targets, skipped=None):
        """Return the mean loss of the targets that count; unit `skipped` is left out."""
        x = self.embedding(tokens)
        for number, block in enumerate(self.units):
            if number != skipped:
                x = checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
        x = self.statistics((x + x @ self.experts.mean(0)).view(-1, WIDTH))
        return F.cross_entropy(self.head(x).float(), targets.view(-1))


class Training:
    """One configuration on one rank.

    told: the bits of what is noted. pieces: masters and states that this rank owns, by the number of their first
        element, of which the ranks' make a whole. sums: tables of which the ranks' add up. So these do not depend on
        where the buckets begin, as by_piece does.
    """

    def __init__(self, configuration, device):
        self.told = {}
        self.pieces = []
        self.sums = []
        self.at, self.skipped_steps = "at the start", 0
        self.chosen, self.device = configuration, device
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.dice, self.seed = random.Random(configuration["seed"]), zlib.crc32(configuration["seed"].encode())
        self.spoils = None  # what becomes of a gradient: "inf", "nan", "raises"
        self.forward_fails = False
        self.saved = {}
        self.runner = None  # of a pipeline
        self.tp_rank, self.dp_rank = 0, self.rank
        layout = configuration["layout"]
        self.tp, self.pp = 1 + ("tp2" in layout), 1 + ("pp2" in layout)
        self.dp = self.size // self.tp // self.pp
        self.count = configuration["grad_accum_steps"] + (self.pp > 1)  # whole rounds of two stages
        torch.manual_seed(self.seed)
        self.engine = self._build()

    def _build(self):
        """Return the engine as a job builds it."""
        from megamix.parallel.build import build_model, drawn

        build_engine = found("builders.objects:build_engine", "train.build:build_engine")
        build_runner = found("builders.objects:build_runner", "train.build:build_passes")
        plan_pipeline = found("builders.objects:plan_pipeline", "train.build:plan_pipeline")
        config = self._config()
        if self.chosen["layout"] in REPLICATED:
            net = Net(self.chosen["model"]).to(self.device)
            self._hook(net.units)
            units = [*net.units] if self.chosen["units"] else []
            return build_engine(config, net, units, self.count, fill=self._fill if self.chosen["fill"] else None)
        is_new = hasattr(megamix.Topology, "parts")
        sizes = {"pp": self.pp, "tp": self.tp}
        topology = megamix.Topology.connect(**{axis if is_new else f"{axis}_size": sizes[axis] for axis in sizes})
        stages = plan_pipeline(config)
        self.tp_rank, self.dp_rank = topology.tp.rank, topology.data.rank
        sequence = config.parallelism.sequence_parallel
        if is_new:
            model, placements = build_model(config.model, config.parallelism, topology, self.device, stages)
        else:
            model, placements = build_model(config.model, topology, self.device, stages, sequence_parallel=sequence)
        self._hook([unit for unit in model.units if [*unit.parameters()]])  # a stage has some of the layers
        fill = drawn(model, self.seed)
        engine = build_engine(config, model, model.units, self.count, topology, placements, fill)
        self.runner = build_runner(config, engine, model, stages) if stages else None
        return engine

    def _config(self):
        from megamix.config import config_from_dict

        chosen, layout = self.chosen, self.chosen["layout"]
        name = chosen["optimizer"].partition("_")[0]
        parallelism = {key: chosen[key] for key in ("overlap", "shard", "accumulate")}
        parallelism |= {"tp_size": self.tp, "pp_size": self.pp, "dp_size": self.dp}
        parallelism |= {"bucket_size": chosen["bucket_size"]} if chosen["bucket_size"] else {}
        parallelism |= {"sequence_parallel": False} if layout == "tp2" else {}
        parallelism |= {"pp_schedule": "interleaved_zero_bubble"} if layout == "pp2zb" else {}
        wide = {"reduce_dtype": "half_fp32_sum"} if chosen["reduce"] == "half_fp32_sum" else {}
        scale = {"rule": chosen["scale"], **SCALES.get(chosen["scale"], {})}
        groups = [{"pattern": "*norm*", "lr_factor": 2.0}, {"pattern": "*gain", "lr_factor": 0.5, "weight_decay": 0.2}]
        return config_from_dict({
            "model": {
                "vocab_size": VOCAB, "seq_len": LENGTH, "hidden_size": WIDTH, "num_heads": 4, "num_kv_heads": 2,
                "num_layers": 4 if layout == "pp2zb" else 3, "tie_embeddings": chosen["model"] == "tied",
                "init_std": 0.1,
            },
            "data": {"train": "none"},
            "optimizer": {
                "name": name, "lr": 1e-2, "compile": chosen.get("compiled", False), "clip_grad": chosen["clip_grad"],
                "groups": groups, name: OPTIMIZERS[chosen["optimizer"]],
            },
            "precision": {"dtype": chosen["dtype"], "grad_dtype": chosen["grads"], "loss_scale": scale, **wide},
            "parallelism": parallelism,
            "training": {
                "steps": 10, "micro_batch_size": SAMPLES, "global_batch_size": SAMPLES * self.dp * self.count,
            },
            "checkpoint": {"folder": "none"},
        })  # fmt: skip

    def _fill(self, spec, start, values):
        generator = torch.Generator().manual_seed(zlib.crc32(spec.name.encode()))
        whole = 0.2 * torch.randn(spec.full_shape, generator=generator)
        values.copy_(whole.flatten()[start : start + values.numel()])

    def _hook(self, units):
        """Plant what may go wrong, and record values."""
        inner = units[len(units) // 2]
        inner.register_forward_pre_hook(self._before_unit)
        units[0].register_forward_hook(self._after_unit)
        matrix = next(param for param in inner.parameters() if param.dim() > 1)
        matrix.register_hook(self._spoilt)

    def _before_unit(self, unit, args):
        if self.forward_fails:
            raise Planted

    def _after_unit(self, unit, args, output):
        values = (output if isinstance(output, Tensor) else output[0]).detach().float()
        megamix.record("unit/mean", values.mean())
        megamix.record("unit/peak", values.abs().amax(), "max")

    def _spoilt(self, grad):
        if self.spoils == "raises":
            raise Planted
        if self.spoils is None or self.rank != {"inf": self.size - 1, "nan": 0}[self.spoils]:
            return grad
        grad = grad.clone()
        grad.view(-1)[-1].fill_(float(self.spoils))
        return grad

    # The record.

    def note(self, what, value):
        self.told[f"{self.at}: {what}"] = bits(value)

    def note_step(self, result):
        for name in ("loss", "found_inf", "grad_norm", "max_abs", "loss_scale", "lr", "stop_requested", "by_piece"):
            self.note(name, getattr(result, name))
        for name, value in result.recorded.values().items():
            self.note(f"recorded {name}", value)
        self.note("number of recorded values", result.recorded.num_values)
        if result.examination is not None:
            self.note("examination.local", result.examination.local)
            for name in ("exponents", "zeros", "updates"):
                table = getattr(result.examination, name).cpu()
                self.sums.append((f"{self.at}: examination.{name}", table))
        for name, buffer in self.engine.module.named_buffers():
            self.note(f"buffer {name}", buffer)
        self.note_counters()

    def note_counters(self):
        self.note("applied_updates", self.engine.applied_updates)
        self.note("skipped_steps", self.engine.skipped_steps)
        for name, value in self.engine.loss_scale.state_dict().items():
            self.note(f"loss scale's {name}", value)

    def look(self):
        """Note masters, states and half parameters; awaits what is under way."""
        for owned in self.engine.owned_ranges():
            block = f" of tp rank {self.tp_rank}" if owned.spec.shape != owned.spec.full_shape else ""
            for state, values in owned.tensors.items():
                what = f"{self.at}: {state} of {owned.spec.name}{block}"
                self.pieces.append((what, owned.start, values.detach().to("cpu", copy=True)))
        with self.engine.whole_parameters():
            for name, param in self.engine.module.named_parameters():
                self.note(f"parameter {name}", param)

    # The events.

    def run(self):
        happens = self._script()
        self.look()
        for number, events in enumerate(happens):
            self.at = f"attempt {number}"
            self._attempt(number, events)
        self.at = "at the end"
        self.engine.wait()
        self.look()
        for name, value in self.engine.full_weights().items():
            self.note(f"full weight {name}", value)

    def _script(self):
        """Return the events of each attempt; the first has none but the probe and a load."""
        happens = [{"probe"} if self.chosen["probe"] else set(), *(set() for _ in range(1, ATTEMPTS))]
        for event in EVENTS:
            happens[self.dice.randrange(1, ATTEMPTS)].add(event)
        save, restore = sorted(self.dice.sample(range(ATTEMPTS), 2))
        happens[save].add("save")
        happens[restore].add("restore")
        return happens if self.runner is None else [events - NOT_IN_PIPELINES for events in happens]

    def _attempt(self, number, events):
        engine = self.engine
        self._change_state(number, events)
        if "evaluate" in events:
            self._evaluate(number)
        if "discard" in events:
            self._micro_batches(number, self.dice.randrange(1, self.count + 1))
            engine.discard_step()
        if "forward fails" in events:
            self.forward_fails = True
            self._fail(number)
            self.forward_fails = False
            engine.discard_step()
        if "backward fails" in events:
            self.spoils = "raises"
            self._fail(number)
        self.spoils = "inf" if "overflow" in events else "nan" if "nan" in events else None
        if "probe" in events:
            self._micro_batches(number)
            engine.probe_loss_scale()
        if "examine" in events:
            engine.examine_next_step()
        if "stop" in events and self.rank == self.size - 1:
            engine.stop_request.fill_(float(number))
        self._micro_batches(number, ends=self._end() if "last" in events else None, misses="missing" in events)
        self.spoils = None
        result = engine.step()
        if "wait" in events:
            engine.wait()
        self.note_step(result)
        self.skipped_steps += bool(result.found_inf)
        if self.chosen["looks"] == "at each step" or "look" in events:
            self.look()

    def _change_state(self, number, events):
        engine = self.engine
        if "save" in events:
            self.saved = engine.state_dict()
        if "load" in events:
            engine.load_weights({name: 0.875 * value for name, value in engine.full_weights().items()})
        if "restore" in events:
            engine.load_state_dict(self.saved)
        if "publish" in events:
            for owned in engine.owned_ranges():
                owned.tensors["master"].mul_(1.125)
            engine.publish_masters()
        if "lr" in events and self.rank == 0:  # the first rank's holds for all
            engine.set_lr(0.003 * number)
        if "lr table" in events:
            engine.set_lr([0.02, 0.005, 0.01])

    def _fail(self, number):
        with contextlib.suppress(Planted):
            self._micro_batches(number)
            raise AssertionError("nothing has failed")

    def _end(self):
        """Return which micro-batch ends a step before its time: on each data-parallel rank another, where none waits
        for the others' before.
        """
        alike = self.chosen["shard"] == "parameters" or self.chosen["accumulate"] == "owner"
        return 0 if alike else self.dp_rank % self.count

    def _micro_batches(self, number, most=None, *, ends=None, misses=False):
        """Forward and backward of a step's micro-batches; of the first ones alone, or with one that ends the step.
        `misses`: no gradient comes to a unit, on some ranks or all.
        """
        if self.runner is not None:
            MicroBatch = found("parallel.micro_batch_runner:MicroBatch", "parallel.passes:MicroBatch")
            run = getattr(self.runner, "forward_backward", None) or self.runner.backward  # an earlier tree's name
            run([MicroBatch(self._batch(number, place)) for place in range(self.count)])
            return
        skips = misses and (self.chosen["shard"] == "parameters" or self.dp_rank % 2 == 0)
        for place in range((most or self.count) if ends is None else ends + 1):
            loss = self.engine(*self._inputs(number, place, 0 if skips else None))
            self.engine.backward(loss, (1.0, 0.25, 0.5)[place], last=place == ends)

    def _inputs(self, number, place, skipped=None):
        batch = self._batch(number, place)
        replicated = self.chosen["layout"] in REPLICATED
        return (batch.tokens, batch.targets, skipped) if replicated else batch.inputs

    def _batch(self, number, place):
        """Return a micro-batch, a function of where it belongs; some of its targets count for nothing."""
        from megamix.data.loader import Batch

        generator = torch.Generator().manual_seed(self.seed + 1000 * number + 50 * self.dp_rank + place)
        tokens = torch.randint(VOCAB, (SAMPLES, LENGTH + 1), generator=generator)
        inputs, targets = tokens[:, :-1].clone(), tokens[:, 1:].clone()
        targets[:, place] = -100
        return Batch(inputs.to(self.device), targets.to(self.device), None, SAMPLES * (LENGTH - 1))

    @torch.no_grad()
    def _evaluate(self, number):
        self.engine.module.eval()
        if self.runner is None:
            self.note("evaluated", self.engine(*self._inputs(number, 0)))
        else:
            self.note("evaluated", self.runner.evaluate([self._batch(number, place) for place in range(self.count)]))
        self.engine.module.train()


def bits(value):
    flat = value.detach().to("cpu", copy=True).reshape(-1)  # a NumPy array of the engine's own memory would keep it
    if flat.is_floating_point():
        flat = flat.masked_fill(flat.isnan(), torch.nan)  # which of the many NaNs it is depends on the kernel
    digest = hashlib.blake2b(flat.view(torch.uint8).numpy().tobytes(), digest_size=8).hexdigest()
    shown = f" = {flat.item()}" if flat.numel() == 1 else ""
    return f"{digest} {str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}{shown}"


def train(configuration, tree):
    """Return what one rank tells of a configuration."""
    assert Path(megamix.__file__).is_relative_to(tree), f"{megamix.__file__} is not of {tree}"
    place = ("cuda", torch.cuda.current_device()) if "gpu" in configuration else ("cpu",)
    training = Training(configuration, torch.device(*place))
    training.run()
    return {key: getattr(training, key) for key in ("told", "pieces", "sums", "skipped_steps")}


def quietly(configuration, tree):
    """Train without the warnings that configurations like these bring."""
    logging.disable()
    warnings.simplefilter("ignore")
    return train(configuration, tree)


def joined(ranks):
    """Return what all ranks tell: of each by itself, of all together, and how their pieces lie."""
    pieces = [(what, start, rank, values) for rank, one in enumerate(ranks) for what, start, values in one["pieces"]]
    wholes = {}
    for what, _, _, values in sorted(pieces, key=lambda piece: piece[:3]):
        wholes.setdefault(what, []).append(values)
    tables = {}
    for what, table in (entry for one in ranks for entry in one["sums"]):
        tables.setdefault(what, []).append(table)
    together = {what: bits(torch.cat(parts)) for what, parts in wholes.items()}
    together |= {what: bits(torch.stack(parts).sum(0)) for what, parts in tables.items()}
    told = {"all ranks": together, **{f"rank {rank}": one["told"] for rank, one in enumerate(ranks)}}
    lie = repr([(what, start, rank, values.numel()) for what, start, rank, values in pieces])
    layout = hashlib.blake2b(lie.encode(), digest_size=8).hexdigest()
    return {"told": told, "layout": layout, "skipped": ranks[0]["skipped_steps"], "attempts": ATTEMPTS}


def main(tree, configurations, answers):
    RankPool = found("tools.ranks:RankPool", "ranks:RankPool")
    pools = {}
    with open(answers, "w") as out:
        for one in map(json.loads, Path(configurations).read_text().splitlines()):
            size, on_gpus = one["ranks"], "gpu" in one
            if (size, on_gpus) not in pools:
                pools[size, on_gpus] = RankPool(size, on_gpus=on_gpus, deadline_s=DEADLINE_S)
            pool = pools[size, on_gpus]
            try:
                answer = joined(_on_gpus(pool, one, tree) if on_gpus else pool.call(quietly, one, tree))
            except Exception as error:  # of a rank
                answer = {"error": str(error)}
            print(json.dumps({"number": one["number"], **answer}), file=out, flush=True)
    for pool in pools.values():
        pool.close()


def _on_gpus(pool, configuration, tree):
    from tests.gpu.pools import on_gpu, processes_with_gpus  # the tree's own

    with processes_with_gpus():
        return pool.call(on_gpu, 0, False, quietly, configuration, tree)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""One tree's side: ranks train each configuration with the engine of the tree that PYTHONPATH names, and write down the
bits. A program of its own, which `python -m tests.same_bits` starts. It uses what a user of the engine has and nothing
of its inside, so that one text drives trees of which the inside differs.

    PYTHONPATH=TREE python worker.py TREE CONFIGURATIONS ANSWERS      # lines of JSON, in and out
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import random
import sys
import warnings
import zlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import megamix

ATTEMPTS = 7
VOCAB, WIDTH, LENGTH, SAMPLES = 28, 16, 8, 2
WORLD_SIZES = {"dp1": 1, "dp2": 2, "dp4": 4, "tp2": 2, "dp2tp2": 4, "pp2": 2, "pp2zb": 2}
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
SCALES: dict[str, dict[str, Any]] = {
    "static": {"init_scale": 2.0**10},
    "dynamic": {"init_scale": 2.0**18, "growth_interval": 2, "hysteresis": 2},
    "headroom": {"margin": 8.0},
}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "nag": {},
    "muon": {},
    "adamw_bf16": {"state_dtype": "bf16", "betas": (0.9, 0.99)},  # of which one moment is rounded by chance
    "muon_bf16": {"state_dtype": "bf16"},
}
# What happens in an attempt that chance picks, beside forward, backward and step.
EVENTS = (
    "overflow", "nan", "discard", "backward fails", "forward fails", "lr", "lr table", "examine", "last", "evaluate",
    "missing", "load", "publish", "stop", "wait", "whole",
)  # fmt: skip


class Planted(Exception):
    """The error that a configuration's forward or backward raises on purpose."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 40)
        self.down = nn.Linear(40, WIDTH)
        self.gain = nn.Parameter(torch.ones(1))  # smaller than the ranks are many

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain * self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """A model for ranks that hold all of it; `kind` is the configuration's `model`."""

    def __init__(self, kind: str):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.units = nn.ModuleList(Block() for _ in range(3))
        self.statistics = nn.BatchNorm1d(WIDTH, affine=False) if kind == "buffers" else nn.Identity()
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        if kind == "tied":
            self.head.weight = self.embedding.weight
            self.units[2].up.weight = self.units[0].up.weight
        if kind == "frozen":
            self.units[0].down.weight.requires_grad_(False)
        self.recomputes = kind == "recompute"

    def forward(self, tokens: Tensor, targets: Tensor, skipped: int | None = None) -> Tensor:
        """Return the mean loss of the targets that count; block `skipped` is left out."""
        x = self.embedding(tokens)
        for number, block in enumerate(self.units):
            if number != skipped:
                x = checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
        logits = self.head(self.statistics(x.view(-1, WIDTH)))
        return F.cross_entropy(logits.float(), targets.view(-1))


class Training:
    """One configuration on one rank."""

    def __init__(self, configuration: dict[str, Any], device: torch.device):
        self.told: list[tuple[str, str]] = []  # what of it, and its bits
        self.skipped_steps = 0
        self.chosen, self.device = configuration, device
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.dice = random.Random(configuration["seed"])
        self.seed = zlib.crc32(configuration["seed"].encode())
        self.spoils: str | None = None  # what becomes of a gradient: "inf", "nan", "raises"
        self.forward_fails = False
        self.saved: dict[str, Any] = {}
        self.count = configuration["grad_accum_steps"]
        torch.manual_seed(self.seed)
        self.passes: Any = None  # of a pipeline
        self.engine = self._meshed() if configuration["layout"] not in ("dp1", "dp2", "dp4") else self._replicated()

    def _replicated(self) -> Any:
        model, chosen = Net(self.chosen["model"]).to(self.device), self.chosen
        self._hook(model, model.units)
        name = chosen["optimizer"].partition("_")[0]
        more = {key: DTYPES.get(value, value) for key, value in OPTIMIZERS[chosen["optimizer"]].items()}
        if name == "muon":
            more["fused"] = {"*.up.weight": (24, 16)}
        kind = {"adamw": megamix.AdamW, "nag": megamix.NAG, "muon": megamix.Muon}[name]
        groups = (
            megamix.ParamGroup(pattern="*.gain", lr_factor=0.5, weight_decay=0.2),
            megamix.ParamGroup(pattern="*.norm.*", lr_factor=2.0),
        )
        rules = {
            "static": megamix.StaticLossScale,
            "dynamic": megamix.DynamicLossScale,
            "headroom": partial(megamix.HeadroomLossScale, window=3),
        }
        scale = None if chosen["scale"] == "off" else rules[chosen["scale"]](**SCALES[chosen["scale"]])
        dtype = DTYPES[chosen["dtype"]]
        return megamix.ShardedEngine(
            model,
            kind(lr=0.01, weight_decay=0.1, groups=groups, **more),
            megamix.Precision(
                dtype, torch.float32 if chosen["grads"] == "fp32" else None, scale,
                "half_fp32_sum" if chosen["reduce"] == "half_fp32_sum" else None,
            ),
            megamix.Sharding(
                units=[*model.units] if chosen["units"] else [], bucket_size=chosen["bucket_size"],
                overlap=chosen["overlap"], shard=chosen["shard"], accumulate=chosen["accumulate"],
            ),
            clip_grad=chosen["clip_grad"],
            grad_accum_steps=self.count,
            compile_update=chosen.get("compiled", False),
            fill=self._fill if chosen["fill"] else None,
        )  # fmt: skip

    def _fill(self, spec: Any, start: int, values: Tensor) -> None:
        generator = torch.Generator().manual_seed(zlib.crc32(spec.name.encode()))
        whole = 0.2 * torch.randn(spec.full_shape, generator=generator)
        values.copy_(whole.flatten()[start : start + values.numel()])

    def _meshed(self) -> Any:
        """Return the engine of a job whose ranks divide the model."""
        from megamix.config import config_from_dict
        from megamix.parallel.build import build_model, drawn
        from megamix.train.build import build_engine, build_passes, plan_pipeline

        chosen, layout = self.chosen, self.chosen["layout"]
        tp, pp = 1 + ("tp2" in layout), 1 + ("pp2" in layout)
        dp = self.size // tp // pp
        self.count = {1: 2, 3: 4}[self.count] if pp > 1 else self.count
        name = chosen["optimizer"].partition("_")[0]
        scale = {"rule": chosen["scale"], **SCALES.get(chosen["scale"], {})}
        config = config_from_dict({
            "model": {
                "vocab_size": VOCAB, "seq_len": LENGTH, "hidden_size": WIDTH, "num_heads": 4, "num_kv_heads": 2,
                "num_layers": 4 if layout == "pp2zb" else 3, "tie_embeddings": chosen["model"] == "tied",
                "init_std": 0.1,
            },
            "data": {"train": "none"},
            "optimizer": {
                "name": name, "lr": 1e-2, "compile": chosen.get("compiled", False), "clip_grad": chosen["clip_grad"],
                "groups": [{"pattern": "*norm*", "lr_factor": 2.0}], name: OPTIMIZERS[chosen["optimizer"]],
            },
            "precision": {
                "dtype": chosen["dtype"], "grad_dtype": chosen["grads"], "loss_scale": scale,
                **({"reduce_dtype": "half_fp32_sum"} if chosen["reduce"] == "half_fp32_sum" else {}),
            },
            "parallelism": {
                "tp_size": tp, "pp_size": pp, "dp_size": dp,
                **({"sequence_parallel": False} if layout == "tp2" else {}),
                "overlap": chosen["overlap"], "shard": chosen["shard"], "accumulate": chosen["accumulate"],
                **({"bucket_size": chosen["bucket_size"]} if chosen["bucket_size"] else {}),
                **({"pp_schedule": "interleaved_zero_bubble"} if layout == "pp2zb" else {}),
            },
            "training": {
                "steps": 10, "micro_batch_size": SAMPLES, "global_batch_size": SAMPLES * dp * self.count,
            },
            "checkpoint": {"folder": "none"},
        })  # fmt: skip
        topology = megamix.Topology.connect(pp_size=pp, tp_size=tp)
        stages = plan_pipeline(config)
        sequence = config.parallelism.sequence_parallel
        model, placements = build_model(config.model, topology, self.device, stages, sequence_parallel=sequence)
        self._hook(model, model.units)
        fill = drawn(model, self.seed)
        engine = build_engine(config, model, model.units, self.count, topology, placements, fill)
        if pp > 1:
            self.passes = build_passes(config, engine, model, stages)
        self.dp_rank = topology.data.rank
        return engine

    def _hook(self, model: nn.Module, units: Any) -> None:
        """Plant what may go wrong, and record values."""
        self.dp_rank = self.rank
        own = [unit for unit in units if [*unit.parameters()]]  # a stage has some of the layers
        inner = own[len(own) // 2]
        inner.register_forward_pre_hook(self._before_unit)
        own[0].register_forward_hook(self._after_unit)
        matrix = next(param for param in inner.parameters() if param.dim() > 1)
        matrix.register_hook(self._spoilt)

    def _before_unit(self, unit: nn.Module, args: Any) -> None:
        if self.forward_fails:
            raise Planted

    def _after_unit(self, unit: nn.Module, args: Any, output: Any) -> None:
        values = (output if isinstance(output, Tensor) else output[0]).detach().float()
        megamix.record("unit/mean", values.mean())
        megamix.record("unit/peak", values.abs().amax(), "max")

    def _spoilt(self, grad: Tensor) -> Tensor:
        if self.spoils == "raises":
            raise Planted
        spoils = {"inf": self.size - 1, "nan": 0}
        if self.spoils is None or self.rank != spoils[self.spoils]:
            return grad
        grad = grad.clone()
        grad.view(-1)[-1].fill_(float(self.spoils))
        return grad

    # What is written down.

    def note(self, what: str, value: Any) -> None:
        if isinstance(value, Tensor):
            flat = value.detach().cpu().contiguous().reshape(-1)
            bits = hashlib.blake2b(flat.view(torch.uint8).numpy().tobytes(), digest_size=8).hexdigest()
            shown = f" = {flat.item()}" if flat.numel() == 1 else ""
            value = f"{bits} {str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}{shown}"
        self.told.append((what, str(value)))

    def note_step(self, at: str, result: Any) -> None:
        for name in ("loss", "found_inf", "grad_norm", "max_abs", "loss_scale", "lr", "stop_requested", "by_piece"):
            self.note(f"{at}: {name}", getattr(result, name))
        for name, value in result.recorded.values().items():
            self.note(f"{at}: recorded {name}", value)
        self.note(f"{at}: number of recorded values", result.recorded.num_values)
        for name in ("local", "exponents", "zeros", "updates"):
            self.note(f"{at}: examination.{name}", getattr(result.examination, name, None))
        self.note_counters(at)
        for name, buffer in self.engine.module.named_buffers():
            self.note(f"{at}: buffer {name}", buffer)

    def note_counters(self, at: str) -> None:
        for name in ("applied_updates", "skipped_steps"):
            self.note(f"{at}: {name}", getattr(self.engine, name))
        for name, value in self.engine.loss_scale.state_dict().items():
            self.note(f"{at}: loss scale's {name}", value)

    def look(self, at: str) -> None:
        """Note masters and states that this rank owns, and all half parameters; awaits what is under way."""
        for owned in self.engine.owned_ranges():
            for state, values in owned.tensors.items():
                self.note(f"{at}: {state} of {owned.spec.name}[{owned.start}:]", values)
        with self.engine.whole_parameters():
            for name, param in self.engine.module.named_parameters():
                self.note(f"{at}: parameter {name}", param)

    # What is done.

    def run(self) -> None:
        happens = self._script()
        self.look("at the start")
        for number, events in enumerate(happens):
            self._attempt(number, events)
        self.engine.wait()
        self.look("at the end")
        self.note_counters("at the end")
        for name, value in sorted(self.engine.full_weights().items()):
            self.note(f"at the end: full weight {name}", value)

    def _script(self) -> list[set[str]]:
        """Return the events of each attempt; the first has none but the probe."""
        happens: list[set[str]] = [set() for _ in range(ATTEMPTS)]
        for event in EVENTS:
            happens[self.dice.randrange(1, ATTEMPTS)].add(event)
        save, restore = sorted(self.dice.sample(range(ATTEMPTS), 2))
        happens[save].add("save")
        happens[restore].add("restore")
        if self.chosen["probe"]:
            happens[0].add("probe")
        if self.passes is not None:
            for events in happens:
                events -= {"backward fails", "forward fails", "last", "missing"}
        return happens

    def _attempt(self, number: int, events: set[str]) -> None:
        engine, at = self.engine, f"attempt {number}"
        self._change_state(number, events)
        if "evaluate" in events:
            self._evaluate(at, number)
        if "discard" in events:
            self._micro_batches(number, events, self.dice.randrange(1, self.count + 1))
            engine.discard_step()
        if "forward fails" in events:
            self.forward_fails = True
            with contextlib.suppress(Planted):
                self._micro_batches(number, events)
                raise AssertionError("no forward failed")
            self.forward_fails = False
            engine.discard_step()
        if "backward fails" in events:
            self.spoils = "raises"
            with contextlib.suppress(Planted):
                self._micro_batches(number, events)
                raise AssertionError("no backward failed")
            self.spoils = None
        if "probe" in events:
            self._micro_batches(number, events)
            engine.probe_loss_scale()
            self.note_counters(f"{at}, probed")
        if "examine" in events:
            engine.examine_next_step()
        if "stop" in events and self.rank == self.size - 1:
            engine.stop_request.fill_(float(number))
        self.spoils = "inf" if "overflow" in events else "nan" if "nan" in events else None
        self._micro_batches(number, events)
        self.spoils = None
        result = engine.step()
        if "wait" in events:
            engine.wait()
        self.note_step(at, result)
        self.skipped_steps += bool(result.found_inf)
        if self.chosen["looks"] == "at each step" or "whole" in events:
            self.look(at)

    def _change_state(self, number: int, events: set[str]) -> None:
        engine = self.engine
        if "save" in events:
            self.saved = engine.state_dict()
        if "load" in events:
            weights = engine.full_weights()
            engine.load_weights({name: 0.875 * value for name, value in weights.items()})
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

    def _micro_batches(self, number: int, events: set[str], most: int | None = None) -> None:
        """Forward and backward of a step's micro-batches, or of the first ones alone."""
        if self.passes is not None:
            from megamix.parallel.passes import MicroBatch

            self.passes.backward([MicroBatch(self._batch(number, place)) for place in range(self.count)])
            return
        most = self.count if most is None else most
        ends = self.count - 1
        if "last" in events:  # where each micro-batch is sent or gathered, ranks go on together
            alike = self.chosen["shard"] == "parameters" or self.chosen["accumulate"] == "owner"
            ends = self.dice.randrange(self.count) if alike else self.dp_rank % self.count
        for place in range(min(most, ends + 1)):
            loss = self.engine(*self._inputs(number, place, "missing" in events))
            self.engine.backward(loss, (1.0, 0.25, 0.5)[place], last="last" in events and place == ends)

    def _inputs(self, number: int, place: int, misses: bool = False) -> tuple[Any, ...]:
        batch = self._batch(number, place)
        if self.chosen["layout"] not in ("dp1", "dp2", "dp4"):
            return batch.inputs
        skips = misses and (self.chosen["shard"] == "parameters" or self.dp_rank % 2 == 0)
        return (batch.tokens, batch.targets, 0 if skips else None)

    def _batch(self, number: int, place: int) -> Any:
        """Return a micro-batch, a function of where it belongs; some of its targets count for nothing."""
        from megamix.data.loader import Batch

        generator = torch.Generator().manual_seed(self.seed + 1000 * number + 50 * self.dp_rank + place)
        tokens = torch.randint(VOCAB, (SAMPLES, LENGTH + 1), generator=generator)
        targets = tokens[:, 1:].clone()
        targets[:, place] = -100
        batch = Batch(tokens[:, :-1].clone(), targets, None, int((targets >= 0).sum()))
        return batch._replace(tokens=batch.tokens.to(self.device), targets=batch.targets.to(self.device))

    @torch.no_grad()
    def _evaluate(self, at: str, number: int) -> None:
        self.engine.module.eval()
        if self.passes is not None:
            sums = self.passes.evaluate([self._batch(number, place) for place in range(self.count)])
            self.note(f"{at}: evaluated", sums)
        else:
            self.note(f"{at}: evaluated", self.engine(*self._inputs(number, 0)))
        self.engine.module.train()


def train(configuration: dict[str, Any], tree: str) -> tuple[list[tuple[str, str]], int]:
    """Return what one rank tells of a configuration, and how many of its steps were skipped."""
    assert Path(megamix.__file__).is_relative_to(tree), f"{megamix.__file__} is not of {tree}"
    logging.disable()
    warnings.simplefilter("ignore")
    on_gpu = configuration.get("gpu", False)
    training = Training(
        configuration, torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    )
    training.run()
    return training.told, training.skipped_steps


@contextlib.contextmanager
def _pools(on_gpus: bool) -> Iterator[Any]:
    """Yield what runs a configuration on ranks, which are started once for each world size."""
    from megamix.ranks import RankPool

    pools: dict[int, Any] = {}

    def run(configuration: dict[str, Any], tree: str) -> Any:
        size = WORLD_SIZES[configuration["layout"]]
        pool = pools.setdefault(size, RankPool(size, on_gpus=on_gpus))
        if not on_gpus:
            return pool.call(train, configuration, tree)
        from tests.gpu.pools import on_gpu, processes_with_gpus  # of the tree's own tests

        with processes_with_gpus():
            return pool.call(on_gpu, 0, False, train, configuration, tree)

    try:
        yield run
    finally:
        for pool in pools.values():
            pool.close()


def main(tree: str, configurations: str, answers: str) -> None:
    lines = [json.loads(line) for line in Path(configurations).read_text().splitlines()]
    with _pools(False) as on_cpus, _pools(True) as on_gpus, open(answers, "w") as out:
        for one in lines:
            try:
                ranks = (on_gpus if one.get("gpu") else on_cpus)(one, tree)
                answer = {"ranks": [told for told, _ in ranks], "skipped": ranks[0][1], "attempts": ATTEMPTS}
            except Exception as error:
                answer = {"error": str(error)}
            print(json.dumps({"number": one["number"], **answer}), file=out, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""One tree's side: ranks train each configuration with the engine of the tree that PYTHONPATH names, and write down the
bits. A program of its own, which `python -m tests.same_bits` starts. It builds a training as a job does, and uses
public methods of the engine alone, so that one text drives trees of which the inside differs.

    PYTHONPATH=TREE python worker.py < CONFIGURATIONS > ANSWERS      # lines of JSON: {"ranks", "tree"}; {place: bits}
"""

import copy
import hashlib
import json
import logging
import sys
import warnings

import torch
import torch.distributed as dist

from megamix.config import ParallelismConfig, config_from_dict
from megamix.data.loader import Batch
from megamix.parallel.micro_batch_runner import MicroBatch
from megamix.tools.ranks import RankPool

try:
    from megamix.train.engine import build_training
except ImportError:  # a tree of before it was there
    from megamix.builders.objects import build_training

EVENTS = ("probe", "save", "inf", "discard", "nan", "restore", "load")  # one in each attempt
DEADLINE_S = 180.0


HAS_TABLES = "pipeline" in ParallelismConfig.model_fields


def before_tables(tree):
    """Return a configuration with the keys that a tree had before axes had tables."""
    section = dict(tree["parallelism"])
    for axis, name in {"tp": "tensor", "cp": "context", "ep": "expert", "pp": "pipeline"}.items():
        for key, value in section.pop(name, {}).items():
            section[key if key == "sequence_parallel" else f"{axis}_{key}"] = value
    return tree | {"parallelism": section}


def bits(value):
    flat = value.detach().reshape(-1)
    if flat.is_floating_point():
        flat = flat.masked_fill(flat.isnan(), torch.nan)  # which of the many NaNs it is depends on the kernel
    digest = hashlib.blake2b(flat.contiguous().view(torch.uint8).numpy().tobytes(), digest_size=8).hexdigest()
    shown = f" = {flat.item()}" if flat.numel() == 1 else ""
    return f"{digest} {str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}{shown}"


def batches(config, attempt, topology):
    """Return this rank's micro-batches of a step; some of their targets count for nothing."""
    size, found = config.training.micro_batch_size, []
    for number in range(config.training.global_batch_size // size // topology.data.size):
        generator = torch.Generator().manual_seed(1000 * attempt + 50 * topology.data.rank + number)
        tokens = torch.randint(config.model.vocab_size, (size, config.model.seq_len + 1), generator=generator)
        targets = tokens[:, 1:].clone()
        targets[:, number % 4] = -100
        found.append(Batch(tokens[:, :-1].clone(), targets, None, int((targets >= 0).sum())))
    return found


def train(tree):
    """Return what one rank tells: bits by place; and its parts of masters and states, which make a whole with those of
    other ranks wherever the buckets begin, each (place, block of the parameter, first element, values).
    """
    logging.disable()
    warnings.simplefilter("ignore")
    config = config_from_dict(tree if HAS_TABLES else before_tables(tree))
    runner = build_training(config, torch.device("cpu"))
    engine, rank, told, parts, saved, factor = runner.engine, dist.get_rank(), {}, [], {}, 1.0
    matrices = [param for param in engine.module.parameters() if param.dim() > 1]
    matrices[len(matrices) // 2].register_hook(lambda grad: grad * factor)

    def note(at, values):
        told.update({f"{at}: rank {rank}: {name}": bits(value) for name, value in values.items()})

    def look(at):
        for owned in (*engine.owned_ranges(), *engine.held_states()):
            for state, values in owned.tensors.items():
                block = [part.start for part in owned.spec.block]
                parts.append((f"{at}: {state} of {owned.spec.name}", block, owned.start, values.clone()))
        with engine.whole_parameters():
            note(at, {f"half parameter {name}": param for name, param in engine.module.named_parameters()})

    look("attempt 0 begins")
    for attempt, event in enumerate(EVENTS):
        own = batches(config, attempt, engine.topology)
        micro_batches = [MicroBatch(batch) for batch in own]
        if event in ("probe", "discard"):
            runner.forward_backward(micro_batches)
            engine.probe_loss_scale() if event == "probe" else engine.discard_step()
        elif event == "restore":
            engine.load_state_dict(saved)
        elif event == "load":
            engine.load_weights({name: 0.875 * value for name, value in engine.full_weights().items()})
            note(f"attempt {attempt}", {"evaluation": runner.evaluate(own)})
        spoils = {"inf": dist.get_world_size() - 1, "nan": 0}.get(event) == rank
        factor = float(event) if spoils else 1.0
        runner.forward_backward(micro_batches)
        result = engine.step()
        names = ("loss", "found_inf", "grad_norm", "max_abs", "loss_scale", "lr")
        values = {name: getattr(result, name) for name in names} | dict(result.tallied)
        values |= engine.loss_scale.state_dict() | {"skipped_steps": engine.skipped_steps}
        note(f"attempt {attempt}", values)
        if event == "save":
            saved = copy.deepcopy(engine.state_dict())
        if attempt % 2 == 0:  # a look awaits what is under way
            look(f"attempt {attempt} ends")
    return told, parts


def joined(ranks):
    """Return what all ranks tell: of each by itself, and of the parts that they own together."""
    told, wholes = {}, {}
    for one, _ in ranks:
        told |= one
    for place, *_, values in sorted((part for _, parts in ranks for part in parts), key=lambda part: part[:3]):
        wholes.setdefault(place, []).append(values)
    return told | {place: bits(torch.cat(values)) for place, values in wholes.items()}


def main():
    pools = {}
    for one in [json.loads(line) for line in sys.stdin]:
        size = one["ranks"]
        pool = pools[size] = pools.get(size) or RankPool(size, deadline_s=DEADLINE_S)
        try:
            answer = joined(pool.call(train, one["tree"]))
        except Exception as error:  # of a rank
            answer = {"error": str(error)}
        print(json.dumps(answer), flush=True)
    for pool in pools.values():
        pool.close()


if __name__ == "__main__":
    main()

"""Ranks without processes: threads that compute in lock-step, each with its own part of a model, and hand tensors over
in memory. What they compute is one process's work, with sums in the order of the ranks.
"""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from megamix.beside.added_loss import added_losses_times
from megamix.beside.records import Listener
from megamix.beside.tally import Tally
from megamix.builders.objects import DTYPES
from megamix.comm.collectives import Collectives, Pending, sum_in_rank_order
from megamix.comm.topology import Topology
from megamix.config import axis_sizes
from megamix.mixed_precision.weights import put_parameter
from megamix.model.decoder import Decoder
from megamix.parallel.build import divide_work, outline


@dataclass
class Board:
    """The place where the ranks of one axis put what they send."""

    size: int
    posts: dict[int, object] = field(default_factory=dict)
    barrier: threading.Barrier = field(init=False)

    def __post_init__(self):
        self.barrier = threading.Barrier(self.size, timeout=60)

    def exchanged(self, rank, post):
        """Return the posts of all ranks, in their order."""
        self.posts[rank] = post
        self.barrier.wait()
        found = [self.posts[number] for number in range(self.size)]
        self.barrier.wait()
        return found


class Virtual(Collectives):
    def __init__(self, boards, axis):
        super().__init__(axis)
        self._board = boards.setdefault(axis.ranks, Board(axis.size))

    def table(self, row):
        return torch.stack(self._board.exchanged(self.axis.rank, row.clone()))

    def gather(self, part, number=0):
        return self.table(part)

    def sum_parts(self, parts):
        own = torch.stack([each[self.axis.rank] for each in self._board.exchanged(self.axis.rank, parts.clone())])
        out = torch.empty_like(own[0])
        sum_in_rank_order(own, out)
        return out

    def exchange(self, sent, arrived, to, of):
        pieces = self._board.exchanged(self.axis.rank, sent.clone().split([*to]))
        torch.cat([each[self.axis.rank] for each in pieces], out=arrived)
        return Pending()


class Found(NamedTuple):
    """What one step of all virtual ranks gives."""

    losses: list[float]  # of each rank's micro-batches, one after the other
    grads: dict[str, Tensor]  # the sums over ranks with the loss scale in them, whole parameters
    counts: dict[str, Tensor]  # of all tallies, over all ranks


def take_step(config, num_ranks, weights, buffers, scale, batches_of):
    """Take a step on `num_ranks` ranks, without pipeline stages, whose parts hold all layers."""
    section = config.parallelism.model_copy(update={"pp_size": 1})
    boards = {}
    topologies = [
        Topology.place(rank, dp=num_ranks // section.cp_size, ep_size=section.ep_size, **axis_sizes(section))
        for rank in range(num_ranks)
    ]
    for axis in (axis for place in topologies for axis in (place.cp, place.along("ep"))):
        boards.setdefault(axis.ranks, Board(axis.size))

    def on_rank(topology):
        torch.set_num_threads(1)  # of this thread alone; a product cut between threads has other bits
        model, placements = outline(config.model, section, topology)
        assert isinstance(model, Decoder)
        divide_work(model, section, topology, partial(Virtual, boards))
        model.place_buffers(torch.device("cpu"))
        for name, at in placements.items():
            block = tuple(slice(start, None) for start in at.offset)
            shape = model.get_parameter(name).shape
            own = weights[name][block][tuple(slice(size) for size in shape)]
            put_parameter(model, name, torch.nn.Parameter(own.to(DTYPES[config.precision.dtype]).contiguous()))
        step = Listener(torch.device("cpu"), lambda: not running.backward)
        counts = {}
        for name, module in model.named_modules():
            if isinstance(module, Tally):
                module.value.copy_(buffers[f"{name}.value"])
                counts[f"{name}.value"] = torch.zeros_like(module.value)
                module.connect(counts[f"{name}.value"], step)
        losses, grads = [], {}
        for batch in batches_of(topology.data.rank):
            running.backward = False
            loss = model(*batch.inputs)
            running.backward = True
            (loss.float() / section.cp_size * scale).backward()
            losses.append(loss.item())
            for name, parameter in model.named_parameters():
                grads[name] = parameter.grad if name not in grads else grads[name] + parameter.grad
                parameter.grad = None
        return losses, grads, placements, counts

    running = threading.local()
    # The factor is one of all threads.
    with added_losses_times(scale / section.cp_size), ThreadPoolExecutor(num_ranks) as pool:
        ranks = [*pool.map(on_rank, topologies)]
    grads = {}
    for name in weights:
        whole = torch.zeros(weights[name].shape)
        for _, _, placements, _ in ranks:
            at = placements[name]
            parts = torch.stack([ranks[rank][1][name].flatten() for rank in at.owners.ranks])
            total = torch.empty_like(parts[0])
            sum_in_rank_order(parts, total)
            shape = ranks[at.owners.ranks[0]][1][name].shape
            block = tuple(slice(start, start + size) for start, size in zip(at.offset, shape, strict=True))
            whole[block] = total.view(shape).float()
        grads[name] = whole
    counts = {name: sum(rank[3][name] for rank in ranks) for name in ranks[0][3]}
    return Found([loss for rank in ranks for loss in rank[0]], grads, counts)

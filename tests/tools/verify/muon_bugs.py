"""Bugs of other Muons, to plant in ours."""

import importlib
from contextlib import contextmanager
from unittest import mock

import torch

from megamix import tuned
from megamix.mixed_precision.engine import ShardedEngine
from megamix.mixed_precision.muon import Muon, MuonUpdate, orthogonalised

FAMILY = "tests.tools.verify.per_head"


@contextmanager
def matrices_by_parts():
    """Each rank makes its own part orthogonal: rows of its shard, or its block of a tensor-parallel division."""
    right = MuonUpdate._turn

    def turn(self, arrived, home, found_inf):
        widths = [(block, block.columns.stop - block.columns.start) for block in home.blocks]
        parts = [(place, width) for block, width in widths for place in block.places]
        if any((place.stop - place.start) % width for place, width in parts):
            right(self, arrived, home, found_inf)  # a row is in two shards
            return
        for place, width in parts:
            arrived[place] = orthogonalised(arrived[place].view(-1, width), self._muon).flatten()

    with mock.patch.object(MuonUpdate, "_turn", turn), mock.patch.object(tuned, "MOST_PADDING", -1.0):
        yield


@contextmanager
def tall_not_orthogonalised():
    """A path of its own, for tall matrices, lacks the iteration: theirs is SGD with momentum."""
    right = MuonUpdate._turn

    def turn(self, arrived, home, found_inf):
        if home.matrix.rows <= home.matrix.columns:
            right(self, arrived, home, found_inf)

    with mock.patch.object(MuonUpdate, "_turn", turn):
        yield


@contextmanager
def muon_per_micro_batch():
    """Each micro-batch's gradient is made orthogonal as it comes, and the results are added up."""
    built = ShardedEngine.__init__

    def wrong(self, *args, **kwargs):
        built(self, *args, **kwargs)
        for bucket in self.buckets:
            for slot in bucket.plan.slots:
                if slot.spec.matrices:
                    bucket.named_params[slot.spec.name].register_hook(
                        lambda grad: orthogonalised(grad.bfloat16(), self.optimizer).to(grad.dtype)
                    )

    with mock.patch.object(ShardedEngine, "__init__", wrong):
        yield


@contextmanager
def momentum_moves_on_skipped():
    """The gradient enters the momentum before anybody knows that the step is skipped."""
    right = MuonUpdate._momentum

    def momentum(self, exchange, bucket, spans, step):
        return right(self, exchange, bucket, spans, step._replace(found_inf=torch.zeros_like(step.found_inf)))

    with mock.patch.object(MuonUpdate, "_momentum", momentum):
        yield


@contextmanager
def moments_move_on_skipped():
    """The rank that computes a direction updates the moments of its rows before it is known whether the step counts."""
    right = MuonUpdate._turn

    def turn(self, arrived, homes, found_inf):
        right(self, arrived, homes, torch.zeros_like(found_inf))

    with mock.patch.object(MuonUpdate, "_turn", turn):
        yield


def heads_not_split():
    """The rows that the family names are forgotten."""
    family = importlib.import_module(FAMILY).PerHead
    return mock.patch.object(family, "fused", classmethod(lambda cls, config: {}))


@contextmanager
def matrices_decay_twice():
    """Matrices decay once by the optimizer's wrapper, and once by its equation."""
    right = Muon.equation

    def equation(self, grad, master, states, at):
        if not states:
            master = master - at.lr * at.weight_decay * master
        return right(self, grad, master, states, at)

    with mock.patch.object(Muon, "equation", equation):
        yield


MUON_BUGS = {
    bug.__name__: bug
    for bug in (
        matrices_by_parts,
        tall_not_orthogonalised,
        muon_per_micro_batch,
        momentum_moves_on_skipped,
        moments_move_on_skipped,
        heads_not_split,
        matrices_decay_twice,
    )
}

"""Bugs of others' Muon, to plant in ours."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor

from megamix import tuned
from megamix.mixed_precision.engine import ShardedEngine
from megamix.mixed_precision.matrix_layout import Matrix
from megamix.mixed_precision.matrix_update import MatrixUpdate
from megamix.mixed_precision.muon import Muon, orthogonalised

FAMILY = "tests.verify.per_head"


@contextmanager
def matrices_by_parts() -> Iterator[None]:
    """Each rank makes its own part orthogonal: rows of its shard, or its block of what tensor-parallel ranks divide."""
    right = MatrixUpdate._turn

    def turn(self, arrived, matrices):
        by_parts = []
        for matrix, spread in matrices:
            parts = [(place, columns.stop - columns.start) for _, columns, where in spread for place in where]
            if any((place.stop - place.start) % width for place, width in parts):
                right(self, arrived, [(matrix, spread)])  # a row is in two shards
            else:
                by_parts += parts
        for place, width in by_parts:
            arrived[place] = orthogonalised(arrived[place].view(-1, width), self._muon).flatten()

    with mock.patch.object(MatrixUpdate, "_turn", turn), mock.patch.object(tuned, "MOST_PADDING", -1.0):
        yield


@contextmanager
def tall_not_orthogonalised() -> Iterator[None]:
    """A path of its own, for tall matrices, lacks the iteration: theirs is SGD with momentum."""
    right = MatrixUpdate._turn

    def turn(self, arrived: Tensor, matrices: Sequence[tuple[Matrix, object]]) -> None:
        if matrices[0][0].rows <= matrices[0][0].columns:
            right(self, arrived, matrices)

    with mock.patch.object(MatrixUpdate, "_turn", turn):
        yield


@contextmanager
def muon_per_micro_batch() -> Iterator[None]:
    """Each micro-batch's gradient is made orthogonal as it comes, and these are added up."""
    built = ShardedEngine.__init__

    def wrong(self, *args, **kwargs):
        built(self, *args, **kwargs)
        for bucket in self.buckets:
            for spec in (slot.spec for slot in bucket.plan.slots if slot.spec.matrices):
                bucket.named_params[spec.name].register_hook(
                    lambda grad: orthogonalised(grad.bfloat16(), self.optimizer).to(grad.dtype)
                )

    with mock.patch.object(ShardedEngine, "__init__", wrong):
        yield


@contextmanager
def momentum_moves_on_skipped() -> Iterator[None]:
    """The gradient enters the momentum before anybody knows that the step is skipped."""
    right = MatrixUpdate._momentum

    def momentum(self, exchange, bucket, grad, step):
        return right(self, exchange, bucket, grad, step._replace(found_inf=torch.zeros_like(step.found_inf)))

    with mock.patch.object(MatrixUpdate, "_momentum", momentum):
        yield


def heads_not_split() -> object:
    """The rows that the family names are forgotten."""
    family = importlib.import_module(FAMILY).PerHead
    return mock.patch.object(family, "fused", classmethod(lambda cls, config: {}))


@contextmanager
def matrices_decay_twice() -> Iterator[None]:
    """Once by the optimizer's wrapper, and once by its equation."""
    right = Muon.equation

    def equation(self, grad, master, states, at):
        if not states:
            master = master - at.lr * at.weight_decay * master
        return right(self, grad, master, states, at)

    with mock.patch.object(Muon, "equation", equation):
        yield


MUON_BUGS: dict[str, Callable[[], object]] = {
    bug.__name__: bug
    for bug in (
        matrices_by_parts,
        tall_not_orthogonalised,
        muon_per_micro_batch,
        momentum_moves_on_skipped,
        heads_not_split,
        matrices_decay_twice,
    )
}

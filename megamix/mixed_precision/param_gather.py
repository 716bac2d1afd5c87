"""All-gather: every rank's updated half shard travels to all ranks while the next forward already runs."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn

from megamix.clock import Clock
from megamix.comm.collectives import Pending
from megamix.mixed_precision.flat_layout import FlatLayout
from megamix.mixed_precision.half_params import HalfParams
from megamix.mixed_precision.master_shard import MasterShard
from megamix.names import prefix_of

log = logging.getLogger("megamix")


class ParamGather:
    """Launches gathers in the order in which forward needs them, and awaits each where its weights are next read.

    With units they overlap with the forward, and a pre-hook on each unit awaits them. A unit is a submodule whose
    parameters are first read inside its own forward (a transformer block). Its hook awaits every bucket that its
    subtree touches; parameters outside all units are awaited at the root. Hooks on smaller modules than units would not
    do: some modules read a child's weight without calling the child. The `state_dict()` of any submodule awaits all;
    who reads in another way calls `wait_all` first.
    Without units nothing would overlap: the last `updated` awaits all, and every read after it is right.
    `came`: whether a parameter's gradient has come in this backward pass.
    """

    def __init__(
        self, model: nn.Module, units: Sequence[nn.Module], half_params: HalfParams, master_shard: MasterShard,
        overlap: bool, clock: Clock, came: Callable[[str], bool],
    ):  # fmt: skip
        self._half_params, self._masters, self._collectives = half_params, master_shard.master, master_shard.collectives
        self._overlap, self._clock, self._came = overlap, clock, came
        self.pending: dict[int, Pending] = {}
        needs = _buckets_by_unit(model, units, half_params.layout)
        # The root's own buckets first, then unit by unit: the same on every rank, since collectives match by order
        # of issue.
        self.order_of_need = list(dict.fromkeys(bucket for _, buckets in needs for bucket in buckets))
        self._beside_forward = overlap and len(needs) > 1 and any(among.axis.size > 1 for among in self._collectives)
        self.before_read = _before_read
        if self._beside_forward:
            # Never traced: the compiler would refuse the collective or, where the whole model is compiled, silently
            # split it. Here and not where it is defined, since it imports the compiler.
            self.before_read = torch.compiler.disable(_before_read)  # type: ignore[no-untyped-call]  # no types
            for module, buckets in needs:
                module.register_forward_pre_hook(_Await(self, buckets))
        everything = _Await(self, self.order_of_need)
        for module in model.modules():
            module.register_state_dict_pre_hook(everything)  # type: ignore[no-untyped-call]  # no types
        self._told_of_copy = half_params.dtype == torch.float32

    def updated(self, bucket: int) -> None:
        """Send this rank's shard of `bucket`, which is up to date, and receive the others'. Behind the last one all are
        awaited, unless they can travel beside the next forward.
        """
        assert bucket not in self.pending
        flat, shard = self._half_params.flat[bucket], self._half_params.shards[bucket]
        self.pending[bucket] = self._collectives[bucket].all_gather(flat, shard)
        self._clock.watch("all_gather", bucket, self.pending[bucket])
        if not self._overlap:
            self.wait([bucket])
        if bucket == self.order_of_need[-1] and not self._beside_forward:
            self.wait_all()

    def publish(self) -> None:
        """Cast every bucket's master shard into this rank's half shard, and launch it."""
        for bucket in self.order_of_need:
            self._half_params.shards[bucket].copy_(self._masters[bucket])
            self.updated(bucket)

    @contextmanager
    def backward_pass(self, grads: AbstractContextManager[None], loss: Tensor | None) -> Iterator[None]:
        """Take the gradients of one pass, inside `grads`.

        Raises: RuntimeError for those of weights that nothing has awaited.
        """
        with grads:
            yield
            buckets = self._half_params.layout.buckets
            on_their_way = (slot.spec.name for bucket in self.pending for slot in buckets[bucket].slots)
            if early := [name for name in on_their_way if self._came(name)]:
                raise RuntimeError(
                    f"the forward read {early[0]}{f' and {len(early) - 1} more' * (len(early) > 1)} while the values "
                    "were still on their way from the other ranks: Sharding.units awaits them where a unit, or the "
                    "model for what is in none, is called. Pass units that the model calls, unit(x) and not "
                    "unit.forward(x), such as [*model.blocks]; or call engine.wait() before each forward"
                )

    def whole(self) -> AbstractContextManager[None]:
        """Let all parameters be there inside, as they always are."""
        self.wait_all()
        return nullcontext()

    def end(self) -> None:
        """Await all: nothing else comes or goes."""
        self.wait_all()

    def leave(self, call: str) -> None:
        """Await all, since `call` is about to write them."""
        self.wait_all()

    def wait_all(self) -> None:
        """Return once the half parameters of the whole model may be read."""
        self.wait(self.order_of_need)

    def wait(self, buckets: Sequence[int]) -> None:
        """Return once these half parameters may be read: on NCCL by what the current stream does next."""
        for bucket in buckets:
            pending = self.pending.pop(bucket, None)
            if pending is not None:
                with self._clock.span("exposed_all_gather"):
                    pending.wait()

    def note_copy(self) -> None:
        """Say once what a copy in half is no good for."""
        if not self._told_of_copy:
            log.warning(
                "the module was copied in %s. Evaluate the copy as it is; an average of weights (EMA, AveragedModel) "
                "would lose in it every change below its rounding: copy the module before the engine is built, or call "
                ".float() on the copy",
                self._half_params.dtype,
            )
        self._told_of_copy = True


def _before_read(gather: ParamGather, buckets: Sequence[int]) -> None:
    if gather.pending:
        # Without gradients nothing would tell `backward_pass` of weights that are read and that no call awaits.
        gather.wait(buckets if torch.is_grad_enabled() else gather.order_of_need)


class _Await:
    """The hook of a module: await these buckets before its forward, or before its state_dict.

    It holds the gathers weakly: a module that outlives its engine must not keep the buffers and process groups alive.
    """

    def __init__(self, gather: ParamGather | None = None, buckets: Sequence[int] = ()):
        self._gather = (lambda: None) if gather is None else weakref.ref(gather)
        self._buckets = buckets

    def __call__(self, *args: object) -> None:
        if (gather := self._gather()) is not None:
            gather.before_read(gather, self._buckets)

    def __reduce__(self) -> tuple[type[_Await], tuple[()]]:
        """In a copy or a pickle of the module the hook awaits nothing: its weights are nobody's.

        Raises: RuntimeError while gathers are under way: some of the module's weights may be in the copy already.
        """
        gather = self._gather()
        if gather is not None and gather.pending:
            raise RuntimeError(
                "this module's weights are still on their way from the other ranks (Sharding.units): call "
                "engine.wait() before you copy or pickle it"
            )
        return _Await, ()

    def __deepcopy__(self, memo: dict[int, object]) -> _Await:
        self.__reduce__()  # raises, if it must
        if (gather := self._gather()) is not None:
            gather.note_copy()
        return _Await()


def _buckets_by_unit(
    model: nn.Module, units: Sequence[nn.Module], layout: FlatLayout
) -> list[tuple[nn.Module, list[int]]]:
    """(module, buckets that must be there before it runs): the root first, then the units in registration order."""
    bucket_of = {
        name: index
        for index, bucket in enumerate(layout.buckets)
        for slot in bucket.slots
        for name in (slot.spec.name, *slot.spec.aliases)
    }
    prefixes = {prefix_of(path): module for path, module in model.named_modules() if module in units}
    root_buckets = [index for name, index in bucket_of.items() if not name.startswith(tuple(prefixes))]
    needs = [(model, sorted(set(root_buckets), reverse=True))]
    for prefix, module in prefixes.items():
        # Buckets lie in reverse registration order, forward needs them from the last to the first.
        needs.append((module, sorted({i for name, i in bucket_of.items() if name.startswith(prefix)}, reverse=True)))
    return needs

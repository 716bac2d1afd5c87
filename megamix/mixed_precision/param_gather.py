"""All-gather: every rank's updated half shard travels to all ranks while the next forward already runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from megamix.clock import Clock
from megamix.comm.collectives import Collectives, Pending
from megamix.mixed_precision.flat_layout import FlatLayout


class ParamGather:
    """Launches gathers in the order in which forward needs them; a forward pre-hook on each unit awaits them,
    nothing else does.

    A unit is a submodule whose parameters are first read inside its own forward (a transformer block). Its hook
    awaits every bucket that its subtree touches; parameters outside all units, and everything when no units are
    given, are awaited at the root. Hooks on smaller modules than units would not do: some modules read a child's
    weight without calling the child.
    """

    def __init__(
        self, model: nn.Module, units: Sequence[nn.Module], layout: FlatLayout,
        half_params: list[Tensor], owners: Sequence[Collectives], overlap: bool, clock: Clock,
    ):  # fmt: skip
        self._half_params, self._owners, self._overlap, self._clock = half_params, owners, overlap, clock
        self.half_shards = [
            flat.view(own.axis.size, -1)[own.axis.rank] for flat, own in zip(half_params, owners, strict=True)
        ]
        self._pending: dict[int, Pending] = {}
        needs = _buckets_by_unit(model, units, layout)
        # The root's own buckets first, then unit by unit: the same on every rank, since collectives match by order
        # of issue.
        self.order_of_need = list(dict.fromkeys(bucket for _, buckets in needs for bucket in buckets))
        if any(own.axis.size > 1 for own in owners):
            for module, buckets in needs:
                module.register_forward_pre_hook(self._make_hook(buckets))

    def launch(self, bucket: int) -> None:
        """This rank's shard of `bucket` is up to date: send it, receive the others'."""
        assert bucket not in self._pending
        self._pending[bucket] = self._owners[bucket].all_gather(self._half_params[bucket], self.half_shards[bucket])
        if not self._overlap:
            self._wait([bucket])

    def publish(self, masters: Sequence[Tensor]) -> None:
        """Cast every bucket's master shard into this rank's half shard, and launch it."""
        for bucket in self.order_of_need:
            self.half_shards[bucket].copy_(masters[bucket])
            self.launch(bucket)

    def wait_all(self) -> None:
        """Return once the half parameters of the whole model may be read."""
        self._wait(self.order_of_need)

    def _wait(self, buckets: Sequence[int]) -> None:
        for bucket in buckets:
            pending = self._pending.pop(bucket, None)
            if pending is not None:
                with self._clock.span("exposed_all_gather"):
                    pending.wait()

    def _make_hook(self, buckets: Sequence[int]) -> Callable[..., None]:
        # Never traced: the compiler would refuse the collective or, where the whole model is compiled, silently
        # split it.
        def await_parameters(module: nn.Module, args: object) -> None:
            if self._pending:
                self._wait(buckets)

        disabled: Callable[..., None] = torch.compiler.disable(await_parameters)  # type: ignore[no-untyped-call]
        return disabled


def _buckets_by_unit(
    model: nn.Module, units: Sequence[nn.Module], layout: FlatLayout
) -> list[tuple[nn.Module, list[int]]]:
    """(module, buckets that must be there before it runs): the root first, then the units in registration order."""
    bucket_of = {slot.spec.name: index for index, bucket in enumerate(layout.buckets) for slot in bucket.slots}
    bucket_of |= {
        alias: index
        for index, bucket in enumerate(layout.buckets)
        for slot in bucket.slots
        for alias in slot.spec.aliases
    }
    paths = {id(module): path for path, module in model.named_modules()}
    for unit in units:
        if id(unit) not in paths:
            raise ValueError(
                f"units must be submodules of the model; {type(unit).__name__} is not. Pass e.g. [*model.blocks]"
            )
    wanted = {id(unit) for unit in units} - {id(model)}
    prefixes = {path + ".": module for path, module in model.named_modules() if id(module) in wanted}
    root_buckets = [index for name, index in bucket_of.items() if not name.startswith(tuple(prefixes))]
    needs = [(model, sorted(set(root_buckets), reverse=True))]
    for prefix, module in prefixes.items():
        # Buckets lie in reverse registration order, forward needs them from the last to the first.
        needs.append((module, sorted({i for name, i in bucket_of.items() if name.startswith(prefix)}, reverse=True)))
    return needs

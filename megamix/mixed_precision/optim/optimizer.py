"""The parts of every optimizer: settings, groups of parameters, and its equation as a pure elementwise function in
FP32.

An optimizer holds settings and formulas. Its buckets hold the states, sliced like the masters, and the fused update
runs the equation. Your own optimizer is a frozen dataclass derived from `Optimizer`, with `states` and `equation`, and
with `coefficients` if the equation needs the update's number.
"""

import inspect
import logging
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from megamix.base.clock import Clock
from megamix.base.names import matches
from megamix.comm.topology import Topology
from megamix.mixed_precision.bucket import Bucket, OwnedRange
from megamix.mixed_precision.flat_layout import GroupSpan
from megamix.mixed_precision.observer import GRADIENT, StepObserver
from megamix.mixed_precision.step import entry, put_table
from megamix.mixed_precision.update_slice import (
    AVERAGE,
    MASTER,
    Frozen,
    GroupValues,
    Kernel,
    States,
    StepScalars,
    Table,
    Tensors,
    UpdateGroup,
    UpdateScalars,
    UpdateSlice,
    number_at,
    table_of,
)
from megamix.settings.limits import Finite, NotNegativeByUpdate, check
from megamix.settings.optimizers import OF_SOME_OPTIMIZERS, GroupSettings

log = logging.getLogger("megamix")

# No state may have one of these names: they stand beside the states' names in checkpoints, in exports and in
# `megamix verify`.
TAKEN_NAMES = (MASTER, AVERAGE, "buffer", "direction", "gradient", "step")
STATE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamGroup(GroupSettings):
    """Gives parameters whose names match a shell pattern, such as `*.bias`, settings of their own. None: the
    optimizer's.

    `lr_factor`: a number, or a sequence with one for each update; later updates use the last number. 0 freezes the
    group in that update: nothing of it changes, its gradient counts neither in the norm nor as an overflow, and its own
    number of updates, as in Adam's bias correction, stays. `min`, `max`: each update ends by clamping the weights.
    """

    min: Finite | None = None
    max: Finite | None = None

    def __new__(cls, *args: object, **settings: object) -> Self:
        require_settings(cls, *args, **settings)
        return object.__new__(cls)

    def __post_init__(self) -> None:
        check(self, f"group {self.pattern!r}")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(
                f"min of group {self.pattern!r} is {self.min}, above its max {self.max}; write a lower one"
            )


def require_settings(kind: type, *args: object, **settings: object) -> None:
    """Refuse settings that the class does not take. Raises: TypeError naming the wrong setting and the known ones."""
    signature = inspect.signature(kind.__init__)  # type: ignore[misc]  # `kind` is a class, not an object
    try:
        signature.bind_partial(None, *args, **settings)
    except TypeError as error:
        known = ", ".join(f"{name}=..." for name in [*signature.parameters][1:])
        raise TypeError(f"{kind.__name__}: {error}; write its settings by name: {kind.__name__}({known})") from None


_NO_GROUP = ParamGroup(pattern="*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """Base class of the optimizers.

    `lr`: a number, or a sequence with a number for each update; later updates use the last number. `groups`: a
    parameter belongs to the first group whose pattern matches its name. Weight decay is 0 for parameters of fewer than
    two dims (norms, biases) unless their group sets one. Weight decay, betas and momentum, of the optimizer and of a
    group, may each be such a sequence, too.
    """

    lr: NotNegativeByUpdate
    weight_decay: NotNegativeByUpdate = 0.0
    groups: tuple[ParamGroup, ...] = ()

    # Settings beside weight decay that `coefficients` has in its `values`: each a number, or one for each update; betas
    # are several of these. A group may have them for itself if ParamGroup has them.
    group_settings: ClassVar[tuple[str, ...]] = ()

    def __new__(cls, *params: object, **settings: object) -> Self:
        if params or "params" in settings:
            raise TypeError(f"{cls.__name__} takes settings by name, and no parameters: write {cls.__name__}(lr=1e-3)")
        require_settings(cls, **settings)
        return object.__new__(cls)

    def __post_init__(self) -> None:
        if not isinstance(self.groups, Sequence):  # an iterator could be read only once
            raise TypeError(f"groups takes a tuple of ParamGroup, got {self.groups!r}; write groups=(ParamGroup(...),)")
        for group in self.groups:
            if not isinstance(group, ParamGroup):
                raise TypeError(
                    f"groups takes ParamGroup, got {type(group).__name__} {group!r}; write "
                    "ParamGroup(pattern='*.bias', lr_factor=..., weight_decay=...): a group is chosen by its names"
                )
            for setting in OF_SOME_OPTIMIZERS:
                if getattr(group, setting) is not None and setting not in self.group_settings:
                    raise ValueError(
                        f"{setting} of group {group.pattern!r} is {getattr(group, setting)}, but {type(self).__name__} "
                        f"takes no {setting} by group; leave it out"
                    )
        check(self)

    def states(self, name: str, shape: tuple[int, ...]) -> Mapping[str, torch.dtype]:
        """Return the names and dtypes (FP32, BF16 or FP16) of one parameter's states, which begin as zeros. An
        optimizer without states returns an empty mapping.

        `shape`: the shape of the whole parameter, even if ranks divide it. Two optimizers that give a state the same
        name and dtype can use each other's contents. The equation gets a half state in FP32, and its result is rounded
        to nearest.
        """
        raise NotImplementedError(f"{type(self).__name__} lacks states(name, shape); return {{}} where it has none")

    def matrices(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the rows of each matrix of a parameter that is updated by whole matrices. Empty: the parameter is
        updated element by element.
        """
        return ()

    def matrix_states(self, rows: int, columns: int) -> Mapping[str, int]:
        """Return the lengths, by name, of the states that a matrix has beside those of its elements, such as a number
        for each row. They are FP32 and begin as zeros. The rank that computes with the matrix holds them.
        """
        return {}

    def state_lengths(self, name: str, shape: tuple[int, ...]) -> Mapping[str, int]:
        """Return the lengths of one parameter's `matrix_states`, summed over its matrices. `shape`: as in `states`."""
        lengths = Counter[str]()
        for rows in self.matrices(name, shape):
            lengths.update(own := self.matrix_states(rows, shape[-1]))
            if wrong := [state for state, length in own.items() if length < 1]:
                raise ValueError(f"{type(self).__name__}.matrix_states: {wrong[0]} has no length of at least 1: {own}")
        return lengths

    def lr_table(self) -> list[float]:
        """Return the learning rates: one for each update, or a single one for all."""
        return [*table_of(self.lr)]

    def own_and_groups(self, setting: str) -> list[Any]:
        """Return the optimizer's own value of a setting, and those of the groups that have one."""
        of_groups = (getattr(group, setting) for group in self.groups)
        return [getattr(self, setting), *(value for value in of_groups if value is not None)]

    def setting_of(self, name: str, setting: str) -> Any:
        """Return a setting of a parameter: its group's, or the optimizer's."""
        own = getattr(self._group(name), setting, None)
        return getattr(self, setting) if own is None else own

    def _group(self, name: str) -> ParamGroup:
        return next((group for group in self.groups if matches(name, [group.pattern])), _NO_GROUP)

    def group_of(self, name: str, shape: tuple[int, ...]) -> UpdateGroup:
        """Return the values that one parameter shares with its group. `shape`: as in `states`.

        Raises: ValueError naming a state whose name or dtype is not allowed.
        """
        states = tuple(self.states(name, shape).items())
        of_matrices = self.state_lengths(name, shape)
        for state, dtype in (*states, *((state, torch.float32) for state in of_matrices)):
            is_taken = state in TAKEN_NAMES or (state in dict(states) and state in of_matrices)
            if not re.fullmatch(r"\w{1,100}", state) or is_taken or dtype not in STATE_DTYPES:
                raise ValueError(
                    f"{type(self).__name__}.states of {name} has {state!r}: {dtype}; a state has a Python name other "
                    f"than {', '.join(TAKEN_NAMES)} and is torch.float32, torch.bfloat16 or torch.float16"
                )
        group = self._group(name)
        decay = self.weight_decay if len(shape) > 1 else 0.0
        own = {setting: self.setting_of(name, setting) for setting in self.group_settings}
        return UpdateGroup(
            lr_factor := table_of(group.lr_factor),
            table_of(decay if group.weight_decay is None else group.weight_decay),
            states,
            betas=tuple(_thawed(table_of(beta), lr_factor) for beta in own.pop("betas", ())),
            settings=tuple((setting, table_of(numbers)) for setting, numbers in own.items()),
            limits=None if group.min is group.max is None else (group.min, group.max),
        )

    def for_model(self, model: nn.Module) -> Self:
        """Return this optimizer with settings that follow from the types of the model's modules, as Muon's tables."""
        return self

    def warnings(self, model: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[str]:
        """Yield a line for each pattern that matches no parameter: it may be misspelt, or meant for another model.
        `shapes`: those of all parameters that the ranks train. `model`: this rank's part of the model.
        """
        for pattern in (group.pattern for group in self.groups):
            if not any(matches(name, [pattern]) for name in shapes):
                yield f"the optimizer's group {pattern!r} matches no parameter of the model"

    def log_warnings(self, model: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> None:
        for line in self.warnings(model, shapes):
            log.warning("%s", line)

    def coefficients(self, update: Tensor, values: GroupValues) -> Tensors:
        """Return what the equation needs of a group's settings and of the update's number, as FP32 device scalars.

        `update` FP64 (): the number, 1 for the first update; updates that freeze the group do not count. `values`: the
        settings at this update.
        """
        return ()

    def dtypes(
        self, states: Sequence[tuple[str, torch.dtype]], half: torch.dtype | None, grad: torch.dtype
    ) -> tuple[torch.dtype | None, torch.dtype]:
        """Return the dtypes of the half output and of the gradient in an update of a span with these states. `half`,
        `grad`: the engine's own dtypes of these; `half` None: the update writes no half parameters.
        """
        return half, grad

    def equation(self, grad: Tensor, master: Tensor, states: States, at: UpdateScalars) -> tuple[Tensor, States]:
        """Return the new master and states, computed element by element and out of place. Where the gradient is zero,
        as in padding, zeros must stay zeros. `states`: by the names that the method `states` returned.

        Shapes: grad, master and each state FP32 (n,).
        """
        raise NotImplementedError(f"{type(self).__name__} lacks equation(grad, master, states, at)")

    def kernel_groups(self, groups: Sequence[UpdateGroup]) -> list[UpdateGroup]:
        """Return the groups for which a kernel is made: the parameters' groups, and any that `bucket_update` adds."""
        return [*groups]

    def bucket_update(
        self,
        kernel: Kernel,
        buckets: Sequence[Bucket],
        topology: Topology,
        clock: Clock,
        observers: Sequence[StepObserver],
    ) -> "BucketUpdate":
        """Return the object that updates the buckets. `kernel`: updates a slice of any group of `kernel_groups`. Every
        rank must call it.
        """
        if any(slot.spec.matrices for bucket in buckets for slot in bucket.plan.slots):
            raise TypeError(f"{type(self).__name__} has matrices, but only Muon updates matrices; derive it from Muon")
        return BucketUpdate(kernel, clock, observers)

    def library_update_(self, part: UpdateSlice, group: UpdateGroup, at: UpdateScalars, step: StepScalars) -> bool:
        """Update in place by one of torch's fused kernels, for machines without a compiler. Return False, and change
        nothing, if no kernel has this very equation. `part`: its gradient is unscaled, its states are FP32, and it has
        no half parameters. `group`: its tables have one number each.
        """
        return False


def _thawed(betas: Table, lr_factor: Table) -> Table:
    """Return betas with 1 where the group is frozen, so that products leave these updates out. A constant stays."""
    if len(betas) == 1 or all(lr_factor):
        return betas
    updates = range(1, 1 + max(len(betas), len(lr_factor)))
    return tuple(number_at(betas, update) if number_at(lr_factor, update) else 1.0 for update in updates)


class BucketUpdate:
    """Updates each element by itself. An optimizer that needs whole matrices derives a class from this one."""

    def __init__(self, kernel: Kernel, clock: Clock, observers: Sequence[StepObserver]):
        self._kernel = kernel
        self._clock = clock
        self._observers = observers

    def held_states(self) -> Iterator[OwnedRange]:
        """Yield views of the states of `Optimizer.matrix_states` that this rank holds. The shapes in each `spec` are
        those of the state.
        """
        yield from ()

    def in_turn(self, buckets: Iterable[Bucket], step: StepScalars) -> Iterator[Bucket]:
        """Update this rank's part of the buckets; yield each one, in this order, when it is done."""
        for bucket in buckets:
            self._begin(bucket)
            with self._clock.span("update"):
                for span in self._cut(bucket, bucket.spans):
                    self._kernel(bucket.part(span), step)
            yield bucket

    def _begin(self, bucket: Bucket) -> None:
        for observer in self._observers:
            observer.on_use(GRADIENT, bucket, bucket.grad_sum)

    def _cut(self, bucket: Bucket, spans: Iterable[GroupSpan]) -> Iterable[GroupSpan]:
        for observer in self._observers:
            spans = observer.cut(bucket, spans)
        return spans


class GroupScalars:
    """Makes the scalars of each group's equation, once a step: the group's settings at this update, on the device, and
    what the optimizer makes of them. They follow from the update's number: nothing is saved, and a skipped step
    advances none.
    """

    def __init__(self, optimizer: Optimizer, groups: Sequence[UpdateGroup], device: torch.device):
        self._optimizer, self._groups = optimizer, groups
        self._lr_factors = [put_table(group.lr_factor, device) for group in groups]
        # By group that some update freezes: how many of the updates until each one did not.
        moved = {n: [*accumulate(map(bool, one.lr_factor))] for n, one in enumerate(groups) if not all(one.lr_factor)}
        self._moved = {number: put_table(counts, device, torch.float64) for number, counts in moved.items()}
        tables = {table for group in groups for table in group.tables}
        self._tables = {table: _OnDevice(table, device) for table in tables}
        self._update: Tensor | None = None  # number of the update for which they were made
        self._made = list[UpdateScalars]()

    def of(self, step: StepScalars) -> list[UpdateScalars]:
        if self._update is not step.update:
            self._update = step.update
            update = step.update.double()
            known = dict[object, Tensors]()  # most groups differ in lr and weight decay alone
            self._made = [self._scalars(number, step.lr, update, known) for number in range(len(self._groups))]
        return self._made

    def frozen(self, update: Tensor) -> Frozen:
        """Return which groups an update freezes. Shapes: update (), 1 for the first."""
        return {number: entry(self._lr_factors[number], update) == 0 for number in self._moved}

    def _scalars(self, number: int, lr: Tensor, update: Tensor, known: dict[object, Tensors]) -> UpdateScalars:
        group, moved, of = self._groups[number], self._moved.get(number), self._tables
        key = group.betas, group.settings, id(moved)
        if key not in known:
            own = update if moved is None else entry(moved, update) + (update - moved.numel()).clamp(min=0.0)
            values = group.values(lambda table: of[table].at(update), lambda table: of[table].product(update, own))
            known[key] = self._optimizer.coefficients(own, values)
        lr = lr * entry(self._lr_factors[number], update)
        return UpdateScalars(lr, self._tables[group.weight_decay].at(update).float(), known[key])


class _OnDevice:
    """A table of numbers, FP64 (updates,)."""

    def __init__(self, table: Table, device: torch.device):
        self._values = put_table(table, device, torch.float64)
        self._before = put_table([*accumulate(table[:-1], mul, initial=1.0)], device, torch.float64)

    def at(self, update: Tensor) -> Tensor:
        """Return the number at an update, FP64 (). Shapes: update FP64 (), 1 for the first."""
        return entry(self._values, update)

    def product(self, update: Tensor, own: Tensor) -> Tensor:
        """Return the product of the numbers of all updates until this one, FP64 (). Shapes: as in `at`. `own`: the
        update's number among those that do not freeze the group; in a table, the others have 1.
        """
        if not self._values.dim():
            return self._values**own
        last = self._values[-1]
        return entry(self._before, update + 1) * last ** (update - len(self._values) + 1).clamp(min=0.0)

"""Facts on each parameter: the dtype in which each of its numbers is kept, and counts of one step."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from megamix.tools.verify.core.tape import plain_name

# Columns in the order in which a step meets them. `sum`: over micro-batches and ranks. `master`: the tensor that the
# optimizer updates.
COLUMNS = ("storage", "compute", "gradient", "wire", "sum", "master", "moments", "checkpoint")
ALL = ""  # ranks that no wrapper names
NOWHERE, UNKNOWN = "-", "?"  # no dtype, and an unknown one: the reason follows that mark
_NAMES = {torch.float64: "fp64", torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
DTYPES = {name: dtype for dtype, name in _NAMES.items()}
HALVES = ("fp16", "bf16")
FP8 = "fp8"  # of products whose operands are codes
EXACT, ESTIMATED = "zeroed", "perhaps_zeroed"  # counts of gradient elements among `looked_at` ones
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes
_NUMBER = re.compile(r"(?:^|(?<=\.))\d+(?=\.)")


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name in the table: fp32, bf16, or torch's own name."""
    return _NAMES.get(dtype, str(dtype).removeprefix("torch."))


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor that several ranks hold together; else the tensor itself."""
    part: Tensor = getattr(tensor, "_local_tensor", tensor)
    return part


def sum_of_bits(tensor: Tensor) -> int:
    """Return the sum of the elements' bits as integers: the same in any order, so on any kind of machine."""
    return int(tensor.detach().view(_BITS[tensor.element_size()]).sum(dtype=torch.int64))


@dataclass(slots=True)
class ParamFacts:
    """Facts on one parameter, or on several that are kept alike: then `name` is their pattern.

    `dtypes`: one for each column. `moments`: one for each moment's name. `counts` add up over ranks and
    parameters; `largest` takes the maximum.
    """

    name: str
    kind: str  # the module's class, and the parameter's name there
    dims: int
    trains: bool
    dtypes: dict[str, str]
    parameters: list[str]
    moments: dict[str, str] = field(default_factory=dict)
    direction: str = NOWHERE  # dtype in which our Muon multiplies matrices, and sends them between ranks
    counts: dict[str, float] = field(default_factory=dict)
    largest: dict[str, float] = field(default_factory=dict)
    # After the step: the different sums of the weight's bits, by the ranks whose copies a wrapper keeps equal (ALL if
    # none does).
    weight_sums: dict[str, list[int]] = field(default_factory=lambda: {ALL: []})

    @property
    def pattern(self) -> str:
        """Return the name without its numbers, which parameters of like modules share."""
        return _NUMBER.sub("*", self.name)

    def count(self, **more: Tensor | float) -> None:
        self.counts |= {name: self.counts.get(name, 0.0) + float(value) for name, value in more.items()}

    def note_largest(self, **values: Tensor | float) -> None:
        self.largest |= {name: max(self.largest.get(name, 0.0), float(value)) for name, value in values.items()}

    def share(self, part: str, of: str) -> float | None:
        """Return one count as a share of another; None if nothing was counted."""
        return self.counts.get(part, 0.0) / self.counts[of] if self.counts.get(of) else None

    @property
    def lost(self) -> float | None:
        """Return the share of the elements with an update whose stored value did not change."""
        return self.share("lost", "due")

    @property
    def stuck(self) -> float:
        """Return the largest share, over half moments, of elements that an update left as they were."""
        return max((self.share(f"stuck {name}", f"due {name}") or 0.0 for name in self.moments), default=0.0)

    @property
    def zeroed_is_exact(self) -> bool:
        return EXACT in self.counts

    @property
    def zeroed(self) -> float | None:
        """Return the share of gradient elements that became zero, or look so (`zeroed_is_exact`)."""
        return self.share(EXACT if self.zeroed_is_exact else ESTIMATED, "looked_at")

    @property
    def at_largest(self) -> float | None:
        """Return the share of the codes in FP8, of both operands of all products, that are the largest."""
        return self.share("codes_largest", "codes")

    @property
    def at_zero(self) -> float | None:
        """Return the share of these codes that are zero."""
        return self.share("codes_zero", "codes")

    @property
    def headroom(self) -> float | None:
        """Return how often the largest gradient element can double before it overflows its dtype, or the sum's."""
        kinds = {part for column in ("gradient", "wire", "sum") for part in self.dtypes[column].split("/")}
        ends, largest = [torch.finfo(DTYPES[kind]).max for kind in kinds & {*DTYPES}], self.largest.get("gradient", 0.0)
        return math.log2(min(ends) / largest) if ends and 0 < largest < math.inf else None

    @property
    def update_to_weight(self) -> float | None:
        """Return the largest rms of an update over rms of its weight, for parameters that are not all zero."""
        return self.largest.get("update_to_weight")

    @property
    def lr(self) -> float:
        return self.largest.get("lr", 0.0)


Facts = Mapping[nn.Parameter, ParamFacts]
Note = Mapping[str, Any]  # what a rank has found, from JSON


def describe(model: nn.Module) -> Facts:
    """Return the facts that follow from the model alone, under names without wrappers' additions.

    A shared parameter has its first name. Raises: ValueError for FSDP1, whose weights are views of flat parameters.
    """
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        raise ValueError("the weights of FullyShardedDataParallel cannot be watched, they are views; use fully_shard")
    state = model.state_dict(keep_vars=True)  # True: values of absent parameters are not asked for
    saved = {plain_name(name): dtype_name(tensor.dtype) for name, tensor in state.items()}
    modules, facts = dict(model.named_modules()), {}
    for full_name, param in model.named_parameters():
        name, (path, _, own) = plain_name(full_name), full_name.rpartition(".")
        told = {"storage": dtype_name(param.dtype), "checkpoint": saved.get(name, NOWHERE)}
        kind = f"{type(modules[path]).__name__.removeprefix('FSDP')}.{own}"
        dtypes = dict.fromkeys(COLUMNS, NOWHERE) | told
        facts[param] = ParamFacts(name, kind, param.dim(), param.requires_grad, dtypes, [name])
    return facts


def join_facts(by_rank: Iterable[Iterable[Mapping[str, Any]]]) -> dict[str, ParamFacts]:
    """Join the facts of all ranks by name. `by_rank`: each rank's facts, as `asdict` gives them."""
    whole = dict[str, ParamFacts]()
    for told in by_rank:
        for one in (ParamFacts(**entries) for entries in told):
            there = whole.setdefault(one.name, replace(one, counts={}, largest={}))
            there.dtypes = {name: joined(there.dtypes[name], cell) for name, cell in one.dtypes.items()}
            there.moments |= one.moments
            there.direction = joined(there.direction, one.direction)
            there.count(**one.counts)
            there.note_largest(**one.largest)
            for ranks, sums in one.weight_sums.items():
                there.weight_sums[ranks] = sorted({*there.weight_sums.get(ranks, []), *sums})
    for one in whole.values():
        moments = [*one.moments.values()]
        one.dtypes["moments"] = "/".join({*moments} if len({*moments}) == 1 else moments) or NOWHERE
        if (squares := one.share("update_squares", "weight_squares")) is not None:
            one.note_largest(update_to_weight=math.sqrt(squares))
    return whole


def joined(*cells: str) -> str:
    """Return all dtypes of these cells in one cell; if none is known, the reason."""
    known = {part for cell in cells if cell[0] not in NOWHERE + UNKNOWN for part in cell.split("/")}
    return "/".join(sorted(known)) or max(cells)

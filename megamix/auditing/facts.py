"""What is known of each parameter: in which dtype each of its numbers is kept, and counts of one step."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

import torch
from torch import Tensor, nn

from megamix.comm.collectives import gather_json, make_collectives
from megamix.comm.topology import Topology

# In the order in which a step meets them. `sum`: over micro-batches and ranks; `master`: what the optimizer updates.
COLUMNS = ("storage", "compute", "gradient", "wire", "sum", "master", "moments", "checkpoint")
NOWHERE, UNKNOWN = "-", "?"  # what is not known is never guessed: behind the mark stands why
_NAMES = {torch.float64: "fp64", torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
DTYPES = {name: dtype for dtype, name in _NAMES.items()}
HALVES = ("fp16", "bf16")
_NUMBER = re.compile(r"(?:^|(?<=\.))\d+(?=\.)")
_WRAPPED = re.compile(r"(?:^|(?<=\.))(?:module|_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)\.")


def dtype_name(dtype: torch.dtype) -> str:
    """Return it as the table has it: fp32, bf16, or torch's own name."""
    return _NAMES.get(dtype, str(dtype).removeprefix("torch."))


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of what several ranks hold together; else the tensor itself."""
    part: Tensor = getattr(tensor, "_local_tensor", tensor)
    return part


@dataclass(slots=True)
class ParamFacts:
    """One parameter. `dtypes`: by column; of a moment by its name. `counts` add up over ranks, of `largest` the maximum
    counts.
    """

    name: str
    kind: str  # the class of its module, and its name there
    dims: int
    trains: bool
    dtypes: dict[str, str]
    moments: dict[str, str] = field(default_factory=dict)
    counts: dict[str, float] = field(default_factory=dict)
    largest: dict[str, float] = field(default_factory=dict)

    @property
    def pattern(self) -> str:
        """Return the name without its numbers, which parameters of like modules share."""
        return _NUMBER.sub("*", self.name)

    def kept(self, columns: Sequence[str]) -> tuple[str, ...]:
        """Return these cells; of moments one for each, or one for all where they are alike."""
        each = [*self.moments.values()]
        moments = "/".join(dict.fromkeys(each) if len({*each}) == 1 else each) or NOWHERE
        return tuple(moments if column == "moments" else self.dtypes[column] for column in columns)

    def count(self, **more: Tensor | float) -> None:
        """Add to the counts."""
        self.counts |= {name: self.counts.get(name, 0.0) + float(value) for name, value in more.items()}

    def note_largest(self, **values: Tensor | float) -> None:
        self.largest |= {name: max(self.largest.get(name, 0.0), float(value)) for name, value in values.items()}


def describe(model: nn.Module) -> tuple[dict[str, ParamFacts], dict[nn.Parameter, str]]:
    """Return what a model says by itself, by name without what wrappers add, and each parameter's name. A shared one
    has its first name.
    """
    saved = {_WRAPPED.sub("", name): tensor for name, tensor in model.state_dict().items()}
    modules = dict(model.named_modules())
    facts: dict[str, ParamFacts] = {}
    names: dict[nn.Parameter, str] = {}
    for full_name, param in model.named_parameters():
        name, (path, _, own) = _WRAPPED.sub("", full_name), full_name.rpartition(".")
        dtypes = dict.fromkeys(COLUMNS, NOWHERE) | {"storage": dtype_name(param.dtype)}
        if name in saved:
            dtypes["checkpoint"] = dtype_name(saved[name].dtype)
        kind = f"{type(modules[path]).__name__.removeprefix('FSDP')}.{own}"
        facts[name] = ParamFacts(name, kind, param.dim(), param.requires_grad, dtypes)
        names[param] = name
    return facts, names


def gather_facts(facts: Sequence[ParamFacts]) -> list[ParamFacts]:
    """Return the facts of all ranks, put together by name. Every rank must call it."""
    world = Topology.current().world
    on_gpu = world.group is not None and torch.distributed.get_backend() == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    collectives = make_collectives(world, 0, torch.uint8, device)
    whole: dict[str, ParamFacts] = {}
    for told in gather_json(collectives, [asdict(one) for one in facts], device):
        for one in (ParamFacts(**entries) for entries in told):
            there = whole.setdefault(one.name, one)
            if there is not one:
                there.dtypes = {name: joined(there.dtypes[name], cell) for name, cell in one.dtypes.items()}
                there.moments |= one.moments
                there.count(**one.counts)
                there.note_largest(**one.largest)
    return [*whole.values()]


def joined(*cells: str) -> str:
    """Return all dtypes of these cells in one; where none is known, why."""
    known = {part for cell in cells if cell[0] not in NOWHERE + UNKNOWN for part in cell.split("/")}
    return "/".join(sorted(known)) or max(cells)

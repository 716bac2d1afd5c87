"""Muon: a matrix moves by its momentum made orthogonal, all else by AdamW (Jordan et al. 2024, "Muon: An optimizer for
hidden layers in neural networks"; Liu et al. 2025, "Muon is scalable for LLM training", for the width rule).
"""

from __future__ import annotations

import fnmatch
import glob
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Literal, Self

import torch
from torch import Tensor, nn

from megamix.clock import Clock
from megamix.comm.topology import Topology
from megamix.mixed_precision.adamw import AdamW
from megamix.mixed_precision.bucket_update import BucketUpdate
from megamix.mixed_precision.muon_update import MuonUpdate
from megamix.mixed_precision.observer import StepObserver
from megamix.mixed_precision.optimizers import are_numbers, require_finite
from megamix.mixed_precision.update_slice import Kernel, States, UpdateGroup, UpdateScalars
from megamix.names import by_plain_name

if TYPE_CHECKING:
    from megamix.mixed_precision.bucket import Bucket

MOMENTUM = "momentum_buffer"
# What has a row for each token or position, and what holds queries, keys and values together, by the usual names.
TABLES = (
    "*embed*", "emb.*", "*_emb", "*_emb.*", "*wte.*", "*wpe.*", "shared.weight",
    "*lm_head.*", "head.*", "*.head.*", "output.*", "classifier.*", "*.classifier.*", "score.*", "*.score.*",
)  # fmt: skip
FUSED = ("*qkv*", "*query_key_value*", "*in_proj?weight", "*x_proj.weight", "*c_attn.weight", "*gate_up*")
# Their own parameters are no maps between hidden states, whatever shape and name.
_NO_MAPS = (nn.Embedding, nn.EmbeddingBag, nn.LayerNorm, nn.RMSNorm, nn.modules.conv._ConvNd)


@dataclass(frozen=True, slots=True, kw_only=True)
class Muon(AdamW):
    """Muon for matrices, AdamW, with the settings that this class inherits, for tables, norms and biases.

    A matrix is what has two dims, or three, (E, out, in) for E of them, unless a shell pattern of `tables` matches its
    name, or its module is an embedding, a norm or a convolution; the patterns of `matrix` and `adamw` are exceptions,
    the latter first.
    `fused`: by pattern, the rows of the matrices that stand one below the other in a parameter, as of queries, keys
    and values; each is orthogonalised by itself.
    """

    momentum: float = 0.95
    nesterov: bool = True
    # Of x -> a x + b (x x^T) x + c (x x^T)^2 x, five times: Jordan's, which take singular values to about [0.7, 1.2].
    ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315)
    ns_steps: int = 5
    ns_dtype: torch.dtype = torch.bfloat16  # of its products, and of what travels between ranks; or FP32
    # "match_rms_adamw": 0.2 sqrt(max(rows, columns)), for which AdamW's lr and decay fit (Liu et al.).
    # "original": sqrt(max(1, rows / columns)) (Jordan). The names are torch.optim.Muon's.
    adjust_lr: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    adamw_lr_factor: float = 1.0  # times lr, for what AdamW moves
    batched: bool = False  # whether matrices of one shape are multiplied together: fewer calls, and other bits
    tables: Sequence[str] = TABLES
    matrix: Sequence[str] = ()
    adamw: Sequence[str] = ()
    fused: Mapping[str, Sequence[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super(Muon, self).__post_init__()
        for key in ("tables", "matrix", "adamw"):
            if not _is_sequence(patterns := getattr(self, key), str):
                raise TypeError(f"{key} takes a list of patterns, got {patterns!r}; write {key}=['*.router.weight']")
        if not isinstance(self.fused, Mapping) or not all(_is_sequence(rows, int) for rows in self.fused.values()):
            example = {"*.qkv.weight": (512, 128, 128)}
            raise TypeError(f"fused takes each matrix's rows by pattern, got {self.fused!r}; write fused={example}")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum must lie in [0, 1), got {self.momentum}; use 0.95")
        if not are_numbers(self.ns_coefficients, 3) or not all(map(math.isfinite, self.ns_coefficients)):
            raise ValueError(f"ns_coefficients must be three finite numbers, got {self.ns_coefficients}; leave it out")
        if not 1 <= self.ns_steps <= 100:
            raise ValueError(f"ns_steps must lie in 1 .. 100, got {self.ns_steps}; use 5")
        if self.ns_dtype not in (torch.bfloat16, torch.float32):
            raise ValueError(f"ns_dtype must be torch.bfloat16 or torch.float32, got {self.ns_dtype}")
        if self.adjust_lr not in ("match_rms_adamw", "original"):
            raise ValueError(f'adjust_lr must be "match_rms_adamw" or "original", got {self.adjust_lr!r}')
        require_finite("adamw_lr_factor", self.adamw_lr_factor)

    def matrices(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        by_adamw = _matches(name, self.adamw) or (_matches(name, self.tables) and not _matches(name, self.matrix))
        if not 2 <= len(shape) <= 3 or 1 in shape[-2:] or by_adamw:
            return ()
        rows, count = shape[-2], math.prod(shape[:-2])
        for pattern, parts in self.fused.items():
            if fnmatch.fnmatchcase(name, pattern):
                if sum(parts) != rows or min(parts) < 1:
                    raise ValueError(f"fused[{pattern!r}] is {[*parts]}, whose sum must be the {rows} rows of {name}")
                return (*parts,) * count
        return (rows,) * count

    def states(self, name: str, shape: tuple[int, ...]) -> Mapping[str, torch.dtype]:
        if self.matrices(name, shape):
            return {MOMENTUM: torch.float32}
        return super(Muon, self).states(name, shape)

    def group_of(self, name: str, shape: tuple[int, ...]) -> UpdateGroup:
        group = super(Muon, self).group_of(name, shape)
        if self.matrices(name, shape):
            return group
        return group._replace(lr_factor=group.lr_factor * self.adamw_lr_factor)

    def for_model(self, model: nn.Module) -> Self:
        no_maps, known = _params_of(model, _NO_MAPS), (*self.tables, *self.matrix, *self.adamw)
        params = by_plain_name(model.named_parameters(remove_duplicate=False))
        found = [name for name, one in params.items() if one in no_maps and one.dim() > 1 and not _matches(name, known)]
        return replace(self, tables=(*self.tables, *map(glob.escape, found)))

    def doubts(self, model: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[str]:
        yield from super(Muon, self).doubts(model, shapes)
        # No model has all of the usual tables, nor need it have its family's; whole names are what `for_model` adds.
        usual = {*TABLES, *getattr(type(model), "tables", ())}
        usual |= {*map(glob.escape, by_plain_name(model.named_parameters(remove_duplicate=False)))}
        for key in ("tables", "matrix", "adamw", "fused"):
            for pattern in getattr(self, key):
                if not fnmatch.filter(shapes, pattern) and not (key == "tables" and pattern in usual):
                    yield f"{key} of Muon has the pattern {pattern!r}, which matches no parameter of the model"
        maps, told = _params_of(model, (nn.Linear,)), set[str]()
        for name, param in by_plain_name(model.named_parameters()).items():
            rows = self.matrices(name, shapes[name]) if name in shapes else ()
            alike = re.sub(r"(?<![^.])\d+(?![^.])", "*", name)  # in all layers
            is_clear = param in maps and not _matches(name, FUSED)
            if rows and not is_clear and alike not in told and not _matches(name, [*self.fused, *self.matrix]):
                told.add(alike)
                yield (
                    f"Muon makes {alike}, {[*shapes[name]]}, orthogonal as {len(rows)} matrix(es). If that is right: "
                    f"matrix=[{alike!r}]; if it holds several, as queries, keys and values, one below the other: "
                    f"fused={{{alike!r}: (rows, rows, rows)}}; if these stand beside each other, or it is a table or a "
                    f"norm, let AdamW move it: adamw=[{alike!r}]"
                )

    def dtypes(
        self, states: Sequence[tuple[str, torch.dtype]], half: torch.dtype, grad: torch.dtype
    ) -> tuple[torch.dtype, torch.dtype]:
        if not states:
            return half, torch.float32  # a direction
        return self.ns_dtype if MOMENTUM in dict(states) else half, grad

    def lr_scale(self, rows: int, columns: int) -> float:
        """Return what the direction of a matrix is multiplied by."""
        if self.adjust_lr == "original":
            return math.sqrt(max(1.0, rows / columns))
        return 0.2 * math.sqrt(max(rows, columns))

    def kernel_groups(self, groups: Sequence[UpdateGroup]) -> list[UpdateGroup]:
        """Add as many without states: of masters that move along directions."""
        return [*groups, *(group._replace(states=()) for group in groups)]

    def bucket_update(
        self, kernel: Kernel, buckets: Sequence[Bucket], topology: Topology, clock: Clock,
        observers: Sequence[StepObserver], num_groups: int,
    ) -> BucketUpdate:  # fmt: skip
        return MuonUpdate(kernel, buckets, topology, clock, observers, self, num_groups)

    def equation(self, grad: Tensor, master: Tensor, states: States, at: UpdateScalars) -> tuple[Tensor, States]:
        """As AdamW, for what it moves. For matrices there are two: with the momentum, whose result takes master's place
        and is what is to be made orthogonal; and without a state, where `grad` is the direction, times its scale.
        """
        if not states:
            return master - at.lr * at.weight_decay * master - at.lr * grad, {}
        if MOMENTUM not in states:
            return super(Muon, self).equation(grad, master, states, at)
        momentum = torch.lerp(states[MOMENTUM], grad, 1 - self.momentum)
        return torch.lerp(grad, momentum, self.momentum) if self.nesterov else momentum, {MOMENTUM: momentum}

    def library_update_(
        self, grad: Tensor, master: Tensor, states: States, at: UpdateScalars, update: Tensor, found_inf: Tensor
    ) -> None:
        if "exp_avg" in states and not self.takes_chances:
            self._fused_update_(grad, master, states, at, update, found_inf)
        else:
            super(Muon, self).library_update_(grad, master, states, at, update, found_inf)


def _is_sequence(values: object, kind: type) -> bool:
    """Return whether they are several of a kind. A text is not: each letter would be a pattern, and * matches all."""
    if isinstance(values, str) or not isinstance(values, Sequence):
        return False
    return all(isinstance(one, kind) for one in values)


def _params_of(model: nn.Module, kinds: tuple[type[nn.Module], ...]) -> set[nn.Parameter]:
    own = (module.parameters(recurse=False) for module in model.modules() if isinstance(module, kinds))
    return {*chain.from_iterable(own)}


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)

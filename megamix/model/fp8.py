"""Products in FP8: each operand is scaled, rounded to codes of one byte, and multiplied from these.

A scale belongs to a whole operand, or to each of its rows, and is taken from the numbers that it scales. A row is what
one number of the result sums over, so an operand has other codes in forward than in backward. An inf makes its scale 0
and its codes NaN, so overflows show in the products although the cast to codes saturates.

An operand of a product is (rows, sum): both operands have the dim that is summed over last.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megamix.base.machine import torch_version
from megamix.base.names import matches
from megamix.config import FP8Config
from megamix.model.decoder import Decoder
from megamix.model.language_model import LanguageModel
from megamix.model.layers import Linear
from megamix.model.ops import Ops, Product, change_ops
from megamix.model.wide import apply

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
HALVES = torch.float16, torch.bfloat16
SMALLEST = 1e-12  # a row of zeros has a scale, too
FP8_CAPABILITY = 8, 9  # of a GPU, at least
MULTIPLE = 16  # a GPU's kernels take sizes that are multiples of it
CPU_KNOWS_ROWS = torch_version() >= (2, 12)  # whether torch multiplies factors of rows on a CPU, too


class Codes(NamedTuple):
    """An operand in FP8."""

    values: Tensor  # FP8 (rows, sum)
    factors: Tensor  # FP32 (rows,) or (1,): what the codes are to be multiplied by


def quantise(x: Tensor, dtype: torch.dtype, by_row: bool) -> Codes:
    """Return the codes of an operand, half (rows, sum)."""
    largest = x.abs().amax(1) if by_row else x.abs().amax().view(1)
    limit = torch.finfo(dtype).max
    # In FP32 the compiler's division rounds otherwise than torch's own.
    scale = (limit / largest.double().clamp(min=SMALLEST)).float()
    values = (x.float() * scale.unsqueeze(1)).clamp(-limit, limit).to(dtype)
    return Codes(values.contiguous(), scale.reciprocal())


def product(a: Codes, b: Codes, dtype: torch.dtype, *, fast: bool = False) -> Tensor:
    """Return the products of all rows of two operands, in `dtype` (rows of a, rows of b). `fast`: a GPU may keep sums
    in fewer bits.

    A GPU takes a second operand in E4M3 alone and, with factors of rows, gives BF16 alone. Raises: ValueError for sums
    over a number that a GPU does not take, as that of a batch's tokens may be; a CPU would take it.
    """
    if a.values.shape[1] % MULTIPLE:
        raise ValueError(f"a product in FP8 sums over {a.values.shape[1]} numbers, must be a multiple of {MULTIPLE}")
    by_row = len(b.factors) > 1
    # unsqueeze() gives a dim of size 1 the stride that the kernels want; contiguous() does not.
    of_a, of_b = a.factors.unsqueeze(1), b.factors.unsqueeze(0)
    if by_row and a.values.is_cpu and not CPU_KNOWS_ROWS:
        return (a.values.float() @ b.values.float().t() * of_a * of_b).to(dtype)
    result: Tensor = torch._scaled_mm(
        a.values, b.values.t(), scale_a=of_a, scale_b=of_b, out_dtype=dtype, use_fast_accum=fast
    )
    return result


class FP8Linear(torch.autograd.Function):
    """A linear layer: x half (rows, in) and its codes, weight half (out, in) -> (rows, out). Keeps x and weight; the
    codes in place of x where backward multiplies these.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, values: Tensor, factors: Tensor, weight: Tensor, ops: Ops, recipe: Recipe
    ) -> Tensor:
        codes_are_enough = recipe.weight_grad_in_fp8 and not recipe.by_row
        ctx.save_for_backward(*((values, factors) if codes_are_enough else (x, None)), weight)
        ctx.ops, ctx.recipe, ctx.dtype = ops, recipe, x.dtype
        return product(Codes(values, factors), quantise(weight, E4M3, recipe.by_row), x.dtype, fast=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, factors, weight = ctx.saved_tensors
        recipe: Recipe = ctx.recipe
        grad_x = grad_weight = None
        codes = quantise(grad, recipe.grad_dtype, recipe.by_row)
        if ctx.needs_input_grad[0]:
            turned_weight = quantise(_only_now(weight, grad).t(), E4M3, recipe.by_row)
            grad_x = product(codes, turned_weight, ctx.dtype)
        if ctx.needs_input_grad[3]:
            if not recipe.weight_grad_in_fp8:
                grad_weight = ctx.ops.whole_linear(grad.t(), x.t(), None)
            elif recipe.by_row:
                by_column = quantise(grad.t(), recipe.grad_dtype, True), quantise(x.t(), E4M3, True)
                grad_weight = product(*by_column, ctx.dtype)
            else:
                turned = Codes(codes.values.t().contiguous(), codes.factors), Codes(x.t().contiguous(), factors)
                grad_weight = product(*turned, ctx.dtype)
        return grad_x, None, None, grad_weight, None, None


def _only_now(weight: Tensor, grad: Tensor) -> Tensor:
    """Return the weight, such that the compiler does not take its codes in forward and keep them until backward: a byte
    a parameter in each micro-batch.
    """
    first = grad.view(-1)[0] if torch.compiler.is_compiling() else None
    return weight if first is None else weight.where(first == first, torch.nan)  # NaN where the product is NaN, too


class Recipe(NamedTuple):
    """Says how a product turns its operands into codes."""

    by_row: bool  # whether each row has a scale
    grad_dtype: torch.dtype
    weight_grad_in_fp8: bool


class FP8Product:
    """The product of a layer, in FP8 (`Ops.product`). Those of other dtypes than half are left to `otherwise`.

    Layers that follow each other with one input share its codes.
    """

    def __init__(self, section: FP8Config, otherwise: Product):
        grad_dtype = E5M2 if section.grad == "e5m2" else E4M3
        self._recipe = Recipe(section.recipe == "rowwise", grad_dtype, section.weight_grad == "fp8")
        self._otherwise = otherwise
        # The last input, its version, and its codes.
        self._last: tuple[weakref.ref[Tensor], int, Codes] | None = None

    def __call__(self, ops: Ops, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if weight.dtype not in HALVES:
            return self._otherwise(ops, x, weight, bias)
        rows = x.reshape(-1, x.shape[-1])
        out = apply(FP8Linear, rows, *self._codes(x, rows), weight, ops, self._recipe).view(*x.shape[:-1], -1)
        return out if bias is None else out + bias

    def _codes(self, x: Tensor, rows: Tensor) -> Codes:
        # The compiler joins what is computed twice. A tensor of inference mode has no version.
        if torch.compiler.is_compiling() or x.is_inference():
            return quantise(rows.detach(), E4M3, self._recipe.by_row)
        if self._last is None or self._last[0]() is not x or self._last[1] != x._version:
            self._last = weakref.ref(x), x._version, quantise(rows.detach(), E4M3, self._recipe.by_row)
        return self._last[2]


def use_fp8(model: LanguageModel, section: FP8Config) -> list[str]:
    """Let a model compute its products as the section says, and return the names of the layers concerned, in the whole
    model. Call it before ranks divide the work; parameters may already be this rank's blocks.

    Raises: ValueError naming a layer that no GPU would take, or a pattern without a layer, or saying that there is no
    layer, or that the model is not one of our own layers.
    """
    names = fp8_names(type(model), model.config, section)
    compute_in_fp8(((name, module) for name, module in model.named_modules() if name in names), section)
    return names


def compute_in_fp8(layers: Iterable[tuple[str, nn.Module]], section: FP8Config) -> None:
    """Let these layers compute their products as the section says. Raises: ValueError naming one that no GPU takes."""
    linear = [(name, layer) for name, layer in layers if isinstance(layer, Linear)]
    for name, layer in linear:
        if any(size % MULTIPLE for size in layer.weight.shape):
            raise ValueError(
                f'precision.fp8.recipe: got "{section.recipe}", and a GPU takes sizes that are multiples of '
                f"{MULTIPLE}, but {name} is {[*layer.weight.shape]} on a rank; take other sizes under [model], or "
                f'write but = ["*.{name.split(".", 2)[-1]}"] and so for each layer of such sizes'
            )
    change_ops((layer for _, layer in linear), lambda ops: replace(ops, product=FP8Product(section, ops.product)))


def fp8_names(family: type[LanguageModel], config: Any, section: FP8Config) -> list[str]:
    """Return the names of the layers whose products are in FP8, in the whole model of this section [model]. Raises: as
    `use_fp8`.
    """
    got = f'precision.fp8.recipe: got "{section.recipe}"'
    if not issubclass(family, Decoder):
        raise ValueError(f"{got}, but a {family.__name__} computes by modules of its own; write precision.fp8 = false")
    modules = family.sketch(config).blocks.named_modules(prefix="blocks", remove_duplicate=False)
    linear = [name for name, module in modules if isinstance(module, Linear)]
    for pattern in section.but:
        if not any(matches(name, [pattern]) for name in linear):
            raise ValueError(
                f'precision.fp8.but: got "{pattern}", the name of no linear layer of the blocks; write names or '
                f"patterns of them, as {linear[0] if linear else ''} (head, embedding and experts stay half anyway)"
            )
    names = [name for name in linear if not matches(name, section.but)]
    if not names:
        raise ValueError(f"{got}, but all linear layers are left out; write precision.fp8 = false, or leave out fewer")
    return names


def in_words(model: LanguageModel, section: FP8Config, *, on_cpu: bool) -> str:
    """Return a line on the layers whose products are in FP8."""
    numbers, parts = defaultdict[str, list[int]](list), defaultdict[str, list[str]](list)
    for name in fp8_names(type(model), model.config, section):
        _, layer, part = name.split(".", 2)
        numbers[part].append(int(layer))
    for part, of in numbers.items():
        as_range = len(of) > 2 and of == [*range(of[0], of[-1] + 1)]
        layers = f"{of[0]} to {of[-1]}" if as_range else ", ".join(map(str, of))
        parts[f"layer{'s' * (len(of) > 1)} {layers}"].append(part)
    said = "; ".join(f"{', '.join(some)} of {layers}" for layers, some in parts.items())
    emulated = ", emulated on this CPU" if on_cpu else ""
    return f"products in FP8, {section.recipe}{emulated} | {said} | the head, experts and all others stay half"

"""The leaf modules, and the table of rotary positions (Su et al. 2021), which turn each pair of a head's elements by an
angle that grows with the position.

The leaf modules are subclasses of torch's, so that tools for torch's modules know them. They compute through Ops, and
none draws initial values. Their attribute `rules` says how parameters are drawn and divided over ranks. The attribute
`flops` is the number of a module's own operations, without those of its children, in forward and backward of one token
in a full sequence; a module without it has none.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, Self

import torch
from torch import Tensor, nn

from megamix.config import Llama3Scaling, ModelConfig, RopeScaling, YarnScaling
from megamix.model.cross_entropy import Slopes, capped_slopes, linear_cross_entropy, slopes
from megamix.model.initial import draw_normal
from megamix.model.ops import Ops


@dataclass(frozen=True, slots=True)
class ParamRule:
    """The rule by which a parameter is drawn at first, and by which the ranks along an axis divide it."""

    draw: Literal["zeros", "ones", "normal"]
    std: float = 0.0  # standard deviation of "normal"; the mean is 0
    divided: int | None = None  # the dim that ranks divide into equal parts; None: each rank holds the whole parameter
    along: str = "tp"  # the axis whose ranks divide it
    # True: each rank holds the whole parameter but uses it for its own heads only, so its gradient is always a part of
    # the sum over ranks.
    within_heads: bool = False

    def fill(self, out: Tensor, **place: Any) -> None:
        """Draw elements of a parameter. `place`: `draw_normal`'s arguments that select them. Shapes: out FP32 (n,)."""
        if self.draw == "normal":
            draw_normal(out, self.std, **place)
        else:
            out.fill_(self.draw == "ones")


def param_rules(model: nn.Module) -> dict[str, ParamRule]:
    """Return the rules of all parameters, from their modules' `rules`. A shared parameter has an entry under each name.

    Raises: ValueError naming a parameter without a rule.
    """
    rules = {}
    for path, module in model.named_modules():
        said: dict[str, ParamRule] = getattr(module, "rules", {})
        for leaf in (leaf for leaf, param in module._parameters.items() if param is not None):
            name = f"{path}.{leaf}" if path else leaf
            if leaf not in said:
                raise ValueError(
                    f"parameter {name}: nothing says how it is drawn and divided; take a layer of "
                    f"megamix.model.layers, or give its module rules = {{{leaf!r}: ParamRule(...)}}"
                )
            rules[name] = said[leaf]
    return rules


class Linear(nn.Linear):
    """A linear layer. `divides`: how tensor-parallel ranks divide it. "columns": each rank computes some columns of the
    output. "rows": each rank has a part of the input; the outputs are summed, and then the bias is added once. None:
    each rank has the whole layer. `within_heads`: each rank uses a whole layer's outputs for its own heads. `std`:
    standard deviation of the initial weights.
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool, ops: Ops, *,
        std: float, divides: Literal["columns", "rows"] | None = None, within_heads: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(in_features, out_features, bias)
        self.ops, self.divides, self.flops = ops, divides, 6 * in_features * out_features
        columns = 0 if divides == "columns" else None  # the weight is (out, in)
        weight = ParamRule("normal", std, 1 if divides == "rows" else columns, within_heads=within_heads)
        self.rules = {"weight": weight, "bias": ParamRule("zeros", divided=columns, within_heads=within_heads)}

    def reset_parameters(self) -> None:
        """Draw nothing: the whole model draws its weights."""

    def forward(self, x: Tensor) -> Tensor:
        return self.ops.linear(x, self.weight, self.bias)


class Head(Linear):
    """The last layer. It returns logits or, with targets, the loss; for the loss it never holds all logits."""

    scale = 1.0  # factor of the logits
    softcap: float | None = None  # logits become softcap * tanh(logit / softcap)
    z_loss = 0.0  # factor of logsumexp(logits)^2 in the loss of a training

    def forward(self, x: Tensor, targets: Tensor | None = None, slopes: Slopes = slopes) -> Tensor:
        """Return the logits; with targets, return the loss as `linear_cross_entropy` does."""
        x = x if self.scale == 1 else x * self.scale
        if targets is None:
            logits = super().forward(x)
            return logits if self.softcap is None else self.softcap * (logits / self.softcap).tanh()
        if self.z_loss and self.training:
            slopes = partial(slopes, z_loss=self.z_loss)
        if self.softcap is not None:
            slopes = partial(capped_slopes, slopes, self.softcap)
        return linear_cross_entropy(x, self.weight, targets, slopes)


class Embedding(nn.Embedding):
    """A table of rows. `divided`: each tensor-parallel rank has some rows. `std`: standard deviation of the initial
    weights.
    """

    scale = 1.0  # factor of the rows that are returned

    def __init__(self, num_rows: int, hidden_size: int, ops: Ops, *, std: float, divided: bool = False) -> None:
        super().__init__(num_rows, hidden_size)
        self.ops, self.rules = ops, {"weight": ParamRule("normal", std, 0 if divided else None)}

    def reset_parameters(self) -> None:
        """Draw nothing: the whole model draws its weights."""

    def forward(self, tokens: Tensor) -> Tensor:
        rows = self.ops.embedding(tokens, self.weight)
        return rows if self.scale == 1 else rows * self.scale


class RMSNorm(nn.RMSNorm):
    """RMSNorm: x / rms(x) * weight, with the mean square in FP32 and the result in x's dtype. `within_heads`: each head
    is normalised by itself. `plus_one`: the factor is 1 + weight, so weights near 0 keep more digits in half.
    """

    def __init__(
        self, hidden_size: int, eps: float, ops: Ops, *, within_heads: bool = False, plus_one: bool = False
    ) -> None:
        super().__init__(hidden_size, eps)
        self.rms_eps, self.ops, self.plus_one = eps, ops, plus_one
        self.rules = {"weight": ParamRule("zeros" if plus_one else "ones", within_heads=within_heads)}

    def forward(self, x: Tensor) -> Tensor:
        if not self.plus_one:
            return self.ops.rms_norm(x, self.weight, self.rms_eps)
        wide = torch.promote_types(x.dtype, torch.float32)  # in half, 1 + weight would lose the digits of the weight
        return self.ops.rms_norm(x.to(wide), self.weight.to(wide) + 1, self.rms_eps).to(x.dtype)


class LayerNorm(nn.LayerNorm):
    """LayerNorm: (x - mean(x)) / std(x) * weight + bias, with mean and std in FP32 and the result in x's dtype."""

    def __init__(self, hidden_size: int, eps: float, bias: bool, ops: Ops) -> None:
        super().__init__(hidden_size, eps, bias=bias)
        self.ops, self.rules = ops, {"weight": ParamRule("ones"), "bias": ParamRule("zeros")}

    def forward(self, x: Tensor) -> Tensor:
        return self.ops.layer_norm(x, self.weight, self.bias, self.eps)


# The norms of the residual stream, by the names that model.norm may have.
NORMS: dict[str, Callable[[ModelConfig, Ops], nn.Module]] = {
    "rmsnorm": lambda config, ops: RMSNorm(config.hidden_size, config.norm_eps, ops),
    "rmsnorm_1p": lambda config, ops: RMSNorm(config.hidden_size, config.norm_eps, ops, plus_one=True),
    "layernorm": lambda config, ops: LayerNorm(config.hidden_size, config.norm_eps, config.bias, ops),
}


class RotaryTables(NamedTuple):
    """Rows of a table of rotary positions, FP32 (T, rotary_dim / 2) or (B, T, rotary_dim / 2)."""

    cos: Tensor
    sin: Tensor
    windowed: "RotaryTables | None" = None  # those of layers with a window, if they have their own


class RotaryTable(nn.Module):
    """Tables of cos and sin of position * frequency, each FP32 (seq_len, rotary_dim / 2), not in the state dict."""

    cos: Tensor
    sin: Tensor

    def __init__(self, seq_len: int, rotary_dim: int, theta: float, scaling: RopeScaling | None = None) -> None:
        super().__init__()
        self.seq_len, self.rotary_dim, self.theta, self.scaling = seq_len, rotary_dim, theta, scaling
        self._fill(torch.get_default_device())

    def _fill(self, device: torch.device) -> None:
        if device.type == "meta":  # no values needed, and the length may be huge; arange would import the compiler
            shape = self.seq_len, self.rotary_dim // 2
            cos, sin = (torch.empty(shape, dtype=torch.float32, device=device) for _ in range(2))
        else:
            # Compute in FP64 until the end: in FP32 an angle of some thousand radians is already off by 1e-4.
            pairs = torch.arange(0, self.rotary_dim, 2, dtype=torch.float64, device=device)
            frequencies = self.theta ** -(pairs / self.rotary_dim)  # radians per position
            factor = 1.0
            if self.scaling is not None:
                frequencies, factor = _stretched(frequencies, self.scaling, self.theta)
            angles = torch.arange(self.seq_len, dtype=torch.float64, device=device)[:, None] * frequencies
            cos, sin = (angles.cos() * factor).float(), (angles.sin() * factor).float()
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # half() would round the tables to three digits, and to_empty() would leave them without values. So they are
        # filled again.
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # untyped in torch
        self._fill(self.cos.device)
        return self

    def forward(self, num_positions: int, positions: Tensor | None = None) -> RotaryTables:
        """Return the tables' rows of the given positions, INT64 (B, T), or of the first num_positions."""
        rows = slice(num_positions) if positions is None else positions
        return RotaryTables(self.cos[rows], self.sin[rows])


class TwoRotaryTables(nn.ModuleList):
    """The table of layers without a window, and that of layers with one."""

    def forward(self, num_positions: int, positions: Tensor | None = None) -> RotaryTables:
        tables, windowed = (table(num_positions, positions) for table in self)
        return RotaryTables(tables.cos, tables.sin, windowed)


def _stretched(frequencies: Tensor, scaling: RopeScaling, theta: float) -> tuple[Tensor, float]:
    """Return the frequencies with their wavelengths stretched by `factor`, and a factor of what is rotated by them.

    "linear" stretches all of them (Chen et al. 2023, Position Interpolation). "llama3" and "yarn" stretch only the long
    ones, which turned few times within a sequence of the earlier training: by the turns themselves (Llama 3.1's
    reference code, `_compute_llama3_parameters` of transformers' modeling_rope_utils.py), or by the place of a
    frequency among all (Peng et al. 2023, YaRN, sections 3.2 and 3.4; `_compute_yarn_parameters`).
    """
    stretched = frequencies / scaling.factor
    if isinstance(scaling, YarnScaling):
        pairs = len(frequencies)

        def place(turns: float) -> float:
            return pairs * math.log(scaling.original_seq_len / (turns * 2 * math.pi)) / math.log(theta)

        low = max(math.floor(place(scaling.beta_fast)), 0)
        high = min(math.ceil(place(scaling.beta_slow)), 2 * pairs - 1)
        places = torch.arange(pairs, dtype=frequencies.dtype, device=frequencies.device)
        share = ((places - low) / (high - low or 0.001)).clamp(0, 1)
        return frequencies.lerp(stretched, share), scaling.attention_factor or 1 + math.log(scaling.factor) / 10
    if not isinstance(scaling, Llama3Scaling):
        return stretched, 1.0
    turns = scaling.original_seq_len * frequencies / (2 * math.pi)  # turns in a sequence of the earlier training
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return stretched.lerp(frequencies, kept.clamp(0, 1)), 1.0

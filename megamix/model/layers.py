"""The leaf modules: subclasses of torch's, so that tools for torch's modules know them, computing through Ops.

None draws initial values: Transformer.reset_parameters does, once for all.
"""

from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor, nn

from megamix.model.ops import Ops


class Linear(nn.Linear):
    def __init__(self, in_features: int, out_features: int, bias: bool, ops: Ops) -> None:
        super().__init__(in_features, out_features, bias)
        self.ops = ops

    def reset_parameters(self) -> None:
        pass

    def forward(self, x: Tensor) -> Tensor:
        return self.ops.linear(x, self.weight, self.bias)


class Embedding(nn.Embedding):
    def __init__(self, num_rows: int, hidden_size: int, ops: Ops) -> None:
        super().__init__(num_rows, hidden_size)
        self.ops = ops

    def reset_parameters(self) -> None:
        pass

    def forward(self, tokens: Tensor) -> Tensor:
        return self.ops.embedding(tokens, self.weight)


class RMSNorm(nn.RMSNorm):
    """x / rms(x) * weight, the mean square in FP32, the result in x's dtype."""

    def __init__(self, hidden_size: int, eps: float, ops: Ops) -> None:
        super().__init__(hidden_size, eps)
        self.rms_eps, self.ops = eps, ops

    def forward(self, x: Tensor) -> Tensor:
        return self.ops.rms_norm(x, self.weight, self.rms_eps)


class LayerNorm(nn.LayerNorm):
    """(x - mean(x)) / std(x) * weight + bias, mean and std in FP32, the result in x's dtype."""

    def __init__(self, hidden_size: int, eps: float, bias: bool, ops: Ops) -> None:
        super().__init__(hidden_size, eps, bias=bias)
        self.ops = ops

    def forward(self, x: Tensor) -> Tensor:
        return self.ops.layer_norm(x, self.weight, self.bias, self.eps)


class RotaryTable(nn.Module):
    """FP32 cos and sin of position * theta**(-2i / head_dim), each (seq_len, head_dim / 2); not in the state dict."""

    cos: Tensor
    sin: Tensor

    def __init__(self, seq_len: int, head_dim: int, theta: float) -> None:
        super().__init__()
        self.seq_len, self.head_dim, self.theta = seq_len, head_dim, theta
        self._fill(None)

    def _fill(self, device: torch.device | None) -> None:
        # FP64 until the end: in FP32 an angle of some thousand radians is already off by 1e-4.
        exponents = torch.arange(0, self.head_dim, 2, dtype=torch.float64, device=device) / self.head_dim
        positions = torch.arange(self.seq_len, dtype=torch.float64, device=device)
        angles = positions[:, None] * self.theta**-exponents
        self.register_buffer("cos", angles.cos().float(), persistent=False)
        self.register_buffer("sin", angles.sin().float(), persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # half() would round the tables to three digits, to_empty() would leave them unset: fill them anew instead.
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._fill(self.cos.device)
        return self

    def forward(self, num_positions: int) -> tuple[Tensor, Tensor]:
        return self.cos[:num_positions], self.sin[:num_positions]

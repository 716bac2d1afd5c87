"""The leaf modules: subclasses of torch's, so that tools for torch's modules know them, computing through Ops.

None draws initial values: Transformer.reset_parameters does, once for all.
"""

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

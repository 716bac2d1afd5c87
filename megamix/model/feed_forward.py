"""The feed-forward part of a transformer's block, which all tokens pass."""

from functools import partial

from torch import Tensor

from megamix.config import ModelConfig
from megamix.model import sizes
from megamix.model.decoder import Branch
from megamix.model.layers import Linear
from megamix.model.ops import Ops
from megamix.model.recompute import recomputed


def activate(ops: Ops, activation: str, x: Tensor, *up: Tensor) -> Tensor:
    """Return f(x), or f(x) * up with the activations that multiply two projections: SiLU or GELU, the exact GELU, its
    tanh form, or relu(x)^2 (So et al. 2021, Primer).
    """
    match activation:
        case "swiglu":
            return ops.swiglu(x, *up)
        case "geglu":
            return ops.gelu(x, "tanh") * up[0]
        case "relu2":
            return x.relu().square()
        case "gelu_tanh":
            return ops.gelu(x, "tanh")
    return ops.gelu(x)


class FeedForward(Branch):
    """The feed-forward part: down(f(gate(x)) * up(x)), or down(f(up(x))). `inner`: its inner width."""

    def __init__(self, config: ModelConfig, ops: Ops, inner: int) -> None:
        super().__init__()
        self.ops, self.activation = ops, config.activation
        self.selective = config.recompute == "selective"
        size, bias, end_std = config.hidden_size, sizes.mlp_bias(config), sizes.branch_end_std(config)
        widen = partial(Linear, size, inner, bias, ops, std=config.init_std, divides="columns")
        self.gate = widen() if sizes.is_gated(config.activation) else None
        self.up = widen()
        self.down = Linear(inner, size, bias, ops, std=end_std, divides="rows")

    def forward(self, x: Tensor) -> Tensor:
        widened = [self.up(x)] if self.gate is None else [self.gate(x), self.up(x)]
        with recomputed(self.selective, partial(activate, self.ops, self.activation, *widened)) as (inner,):
            down: Tensor = self.down(inner)
        return down

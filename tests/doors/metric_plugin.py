"""How large the feed-forward parts' outputs are, of every model that is trained while the plugin is there."""

from torch.nn.modules.module import register_module_forward_hook

import megamix
from megamix.model.layers import RMSNorm
from megamix.model.transformer import FeedForward


def _watch(module, args, out):
    if isinstance(module, FeedForward):
        megamix.record("ffn/rms", out.float().square().mean().sqrt())
        megamix.record("ffn/peak", out.abs().amax(), "max")
        megamix.record("ffn/tokens", out.new_tensor(out.shape[:-1].numel()), "sum")
    if isinstance(module, RMSNorm):  # computed again in backward, with recompute = "selective"
        megamix.record("norm/calls", out.new_ones(()), "sum")


HOOK = register_module_forward_hook(_watch)

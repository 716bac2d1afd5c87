"""`torch.autocast` around `engine(...)`: a model that makes FP32 within trains in half without a change. Loss and
gradients are those of its BF16 copy under autocast, with the same bits whatever a rank keeps.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from megamix import Sharding
from tests.builders import BF16, make_engine


class _Foreign(nn.Module):
    """Its first layer takes FP32, and it makes FP32 in its middle."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 4)])

    def forward(self, x):
        first, norm, last = self.blocks
        return last(norm(first(x)) * torch.linspace(1, 2, 32))


def _loss(model, step, rank):
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(10 * step + rank))
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(x)
    return F.cross_entropy(logits.float(), x.argmax(1) % 4)


def _train(shard):
    model = _Foreign()
    engine = make_engine(model, precision=BF16, sharding=Sharding([*model.blocks], shard=shard))
    results = list[float]()
    for step in range(3):
        engine.backward(_loss(engine, step, engine.world.axis.rank))
        result = engine.step()
        results += [float(result.loss), float(result.grad_norm)]
    return results, engine.full_weights()


def test_a_model_of_fp32_inputs_trains_under_autocast(run_ranks):
    plain = _Foreign().bfloat16()
    losses = [_loss(plain, 0, rank) for rank in range(2)]
    torch.stack(losses).mean().backward()
    norm = torch.cat([param.grad.float().view(-1) for param in plain.parameters()]).norm()
    (kept, weights), _ = run_ranks(_train, 2, "states")
    assert kept[0] == float(torch.stack(losses).mean())
    assert kept[1] == pytest.approx(float(norm), rel=1e-2)
    (freed, same), _ = run_ranks(_train, 2, "parameters")
    assert freed == kept
    assert all(torch.equal(weights[name], same[name]) for name in weights)

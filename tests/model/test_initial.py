"""Initial weights are independent normal numbers, and a pure function of seed, name and place: no layout, block, chunk
or machine changes a bit.
"""

import hashlib
import math
from statistics import NormalDist

import numpy as np
import pytest
import torch

from megamix.model import initial
from megamix.model.initial import draw_normal

SHAPE = (512, 2048)  # 2**20 elements


def _draw(shape=SHAPE, seed=0, name="a", std=1.0):
    out = torch.empty(math.prod(shape))
    draw_normal(out, std, seed=seed, name=name, full_shape=shape, block=[slice(0, size) for size in shape])
    return out.view(shape)


# 4.5 standard errors: by chance in 1 of 150,000 tests; the seeds are fixed.
def test_the_distribution_is_normal_by_kolmogorov_and_smirnov():
    drawn = _draw((128, 2048))
    for numbers in (drawn, drawn[:, ::2], drawn[:, 1::2]):
        x, count = numbers.flatten().double().sort().values, numbers.numel()
        below = torch.erfc(-x / math.sqrt(2)) / 2
        steps = torch.arange(count + 1, dtype=torch.float64) / count
        distance = max((steps[1:] - below).max(), (below - steps[:-1]).max())
        assert distance < 1.95 / math.sqrt(count)  # exceeded by chance in 1 of 1,000
        # The tails, which that distance hardly sees.
        for z in (3.0, 4.0, 4.5):
            expected = 2 * count * (1 - NormalDist().cdf(z))
            assert abs((x.abs() > z).sum() - expected) < 4.5 * math.sqrt(expected)


def test_neighbours_parameters_and_seeds_are_not_correlated():
    one = _draw()
    pairs = {
        "beside": (one[:, :-1], one[:, 1:]),
        "of a pair": (one[:, ::2], one[:, 1::2]),
        "a pair further": (one[:, :-2], one[:, 2:]),
        "below": (one[:-1], one[1:]),
        "another parameter": (one, _draw(name="b")),
        "the next seed": (one, _draw(seed=1)),
        "the same number in another name": (_draw(name="blocks.1"), _draw(name="blocks.11")),
    }
    for what, (first, second) in pairs.items():
        x, y = first.double().flatten(), second.double().flatten()
        bound = 4.5 / math.sqrt(x.numel())
        assert abs((x * y).mean()) < bound, what
        assert abs(((x**2 - 1) * (y**2 - 1)).mean()) < 2 * bound, what


@pytest.mark.parametrize("shape", [(37,), (6, 5), (9, 64), (3, 7, 10), (4, 3, 5)])
def test_any_range_of_any_block_is_that_of_the_whole(shape, monkeypatch):
    whole = _draw(shape)
    rng = np.random.default_rng(0)
    for chunk in (1, 2, 7, 64, 1 << 14):
        monkeypatch.setattr(initial, "_CHUNK", chunk)
        for _ in range(20):
            block = [slice(*sorted(rng.choice(size + 1, 2, replace=False).tolist())) for size in shape]
            wanted = whole[tuple(block)].flatten()
            first, end = sorted(rng.integers(0, wanted.numel() + 1, 2).tolist())
            out = torch.full((end - first,), torch.nan)
            draw_normal(out, 1.0, seed=0, name="a", full_shape=shape, block=block, first=first)
            assert torch.equal(out, wanted[first:end])


def test_the_bits_are_the_same_on_every_machine():
    assert list(map(float.hex, _draw((1, 5), seed=1234, name="embedding.weight", std=0.02)[0].tolist())) == [
        "-0x1.ecfdf00000000p-5", "-0x1.a56faa0000000p-8", "0x1.d350120000000p-7", "0x1.39680e0000000p-5",
        "0x1.1516760000000p-5",
    ]  # fmt: skip
    digest = hashlib.sha256(_draw().numpy().tobytes()).hexdigest()
    assert digest == "0713eecfbd021b065be1bf59e55ff72b8beb7b357ecf0b16cc3fd25f76a2fbcb"

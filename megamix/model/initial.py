"""Initial weights by a counter: each element is a pure function of seed, parameter and place. So a rank draws only the
elements that it owns. The bits do not depend on the layout, on the chunks in which elements are drawn, or on the number
of threads.

The bits come from SplitMix64 (Steele, Lea and Flood 2014, Fast splittable pseudorandom number generators), with a
stream for each parameter. Box and Muller's method (1958) turns 64 bits into two normal numbers, which become neighbours
in a row. Logarithm, sine and cosine are computed from FP32 sums, products, quotients and roots, which every machine
rounds alike; the functions of libraries differ. So runs on a GPU and on a CPU begin with the same weights.
"""

import hashlib
import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_CHUNK = 1 << 14  # pairs of elements drawn at once, so that intermediate arrays stay in cache
_ROOT_HALF, _SIGN = 0x3F3504F3, np.uint32(1 << 31)  # bits of FP32
# Taylor series, the highest power first. They are exact to FP32's rounding in the range where they are used.
_ARTANH = [2 / k for k in (7, 5, 3, 1)]  # 2 artanh(x) / x by x**2
_SIN = [(-1) ** (k // 2) / math.factorial(k) for k in (9, 7, 5, 3, 1)]  # sin(x) / x by x**2
_COS = [(-1) ** (k // 2) / math.factorial(k) for k in (8, 6, 4, 2, 0)]


def draw_normal(
    out: Tensor, std: float, *, seed: int, name: str, full_shape: Sequence[int], block: Sequence[slice], first: int = 0
) -> None:
    """Fill `out`, FP32 (n,), with normal values of mean 0. They are the elements of a parameter's flattened block, from
    number `first` on, and are drawn on the CPU, in whole rows of the block.

    `block`: a slice for each dim of `full_shape`.
    """
    key, gamma = _stream(seed, name)
    full_shape, block = (1, *full_shape), (slice(0, 1), *block)
    columns, pairs_of_row = block[-1], -(-full_shape[-1] // 2)
    length, skipped = columns.stop - columns.start, columns.start % 2
    pairs = np.arange(columns.start // 2, -(-columns.stop // 2), dtype=np.uint64) * gamma
    rows = np.arange(math.prod(full_shape[:-1]), dtype=np.uint64).reshape(full_shape[:-1])[*block[:-1]].reshape(-1, 1)
    end, at_once = first + out.numel(), max(1, _CHUNK // len(pairs))
    for row in range(first // length, -(-end // length), at_once):
        states = rows[row : row + at_once] * np.uint64(pairs_of_row) * gamma + key + pairs
        drawn = _normals(_mixed(states), std)[:, skipped : skipped + length].reshape(-1)
        begin = row * length
        here = slice(max(first, begin), min(end, begin + drawn.size))
        values = torch.from_numpy(drawn[here.start - begin : here.stop - begin])
        out[here.start - first : here.stop - first].copy_(values)


def _stream(seed: int, name: str) -> tuple[np.uint64, np.uint64]:
    """Return the key of a parameter's stream, and its odd gamma: the step between two states. If too few neighbouring
    bits of gamma differ, the stream would be weak, so every second bit is flipped.
    """
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    key, gamma = int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:16], "little") | 1
    if (gamma ^ gamma >> 1).bit_count() < 24:
        gamma ^= 0xAAAA_AAAA_AAAA_AAAA
    return np.uint64(key), np.uint64(gamma)


def _mixed(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return SplitMix64's output for each state, computed in place."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        state ^= state >> np.uint64(shift)
        state *= np.uint64(factor)
    state ^= state >> np.uint64(31)
    return state


def _normals(bits: NDArray[np.uint64], std: float) -> NDArray[np.float32]:
    """Return two normal numbers for each 64 bits, side by side. Shapes: (rows, n) -> (rows, 2 n)."""
    # The distance from 0 is sqrt(-2 ln u). u in (0, 1] is made of 32 bits, and is 2**exponent * m with m in
    # [sqrt(1/2), sqrt(2)).
    low, high = bits.astype(np.uint32), (bits >> np.uint64(32)).astype(np.uint32)
    m = (high.astype(np.float32) + np.float32(0.5)).view(np.int32)
    m += 0x3F800000 - _ROOT_HALF
    exponent = (m >> 23) - (127 + 32)
    m &= 0x7FFFFF
    m += _ROOT_HALF
    x = m.view(np.float32) + np.float32(1)
    x = (m.view(np.float32) - np.float32(1)) / x
    log = _series(x * x, _ARTANH)
    log *= x
    log += exponent.astype(np.float32) * np.float32(math.log(2))
    log *= np.float32(-(std**2))
    distance = np.sqrt(log, out=log).view(np.uint32)
    # The angle is made of 30 bits and lies in one quarter of the circle. The other 2 bits are the signs of the two
    # numbers, which lead to the other quarters.
    x = (low.view(np.int32) >> 2).astype(np.float32)
    x += np.float32(0.5)
    x *= np.float32(math.pi / 2**31)
    square = x * x
    sin, cos = _series(square, _SIN), _series(square, _COS)
    sin *= x
    out = np.empty((*bits.shape, 2), np.float32)
    low <<= np.uint32(30)
    np.multiply(cos - sin, (distance ^ (low & _SIGN)).view(np.float32), out=out[..., 0])
    low <<= np.uint32(1)
    cos += sin
    np.multiply(cos, (distance ^ low).view(np.float32), out=out[..., 1])
    return out.reshape(len(bits), -1)


def _series(x: NDArray[np.float32], factors: Sequence[float]) -> NDArray[np.float32]:
    total = x * np.float32(factors[0])
    for factor in factors[1:-1]:
        total += np.float32(factor)
        total *= x
    total += np.float32(factors[-1])
    return total

"""Kernels for an H100 of norm, query, key and value in FP8: by row one for the norm with the codes of its output, and
one for each weight; no codes of weights are kept from forward to backward, which has as many kernels and bytes as
designed.
"""

import json

import pytest

from tests.conftest import FULL
from tests.gpu import h100, library

TOKENS, HIDDEN, KV = 4096, 4096, 1024


@pytest.mark.skipif(
    not FULL or h100.search_path() is None or library.missing() is not None, reason="compiles for a minute: --full"
)
def test_norm_and_codes_are_one_kernel_and_each_weight_another(tmp_path):
    h100.run("tests.gpu.fp8_kernels", tmp_path)
    found = json.loads((tmp_path / "fp8.json").read_text())
    forward, _ = found["rowwise"]["kernels"]
    assert len(forward) == 1 + 3
    assert len({file for file, _ in forward}) == 3  # key and value are alike
    assert found["rowwise"]["products"] == [{"_scaled_mm": 3, "mm": 0}, {"_scaled_mm": 3, "mm": 3}]
    # Input and weight in half; normed input in half and codes; codes of each weight; factors, and the norm's statistic.
    rows, weights = TOKENS * HIDDEN, HIDDEN * (HIDDEN + 2 * KV)
    exact = (2 + 2 + 1) * rows + (2 + 1) * weights
    moved = sum(size for _, size in forward)
    assert exact < moved < 1.25 * exact  # the kernel of the norm has a tensor more than it needs
    assert len(found["half"]["kernels"][0]) == 1
    assert len(found["tensorwise"]["kernels"][0]) == 3 * (1 + 3)  # largest of parts, scale, codes of each operand
    _, norm = found["half"]["kernels"]
    assert len(norm) == 3
    # Kernels, and bytes an element, of one gradient's codes and of one weight's.
    passes = {"rowwise": ((1, 2 + 1), (3, 2 + 2 + 1)), "tensorwise": ((3, 2 + 2 + 1), (3, 2 + 2 + 1))}
    grads = TOKENS * (HIDDEN + 2 * KV)
    for recipe, (of_grad, of_weight) in passes.items():
        _, backward = found[recipe]["kernels"]
        assert len(backward) == len(norm) + 3 * (of_grad[0] + of_weight[0])
        # Two kernels of each weight get the whole gradient, and read one number of it.
        moved = sum(size for _, size in backward) - 2 * 2 * grads
        exact = sum(size for _, size in norm) + of_grad[1] * grads + of_weight[1] * weights
        assert exact <= moved < 1.01 * exact

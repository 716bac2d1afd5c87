"""The page of experts has the operations, bytes and products of a layer as they are counted today; a layer launches as
many operations for any number of experts.
"""

import expert_kernels

from tests.gpu.expert_kernels import PRODUCTS, count


def test_the_page_has_the_table_of_a_layer():
    page = expert_kernels.PAGE.read_text(encoding="utf-8")
    assert page == expert_kernels.with_table(page), "write it: python docs/expert_kernels.py"


def test_products_take_what_their_sizes_say_and_experts_no_operations():
    rows, hidden, inner = 8192 * 8, 2048, 768
    forward, backward = count(1)
    matrices = 128 * hidden * inner
    assert forward[PRODUCTS].operations == 3
    assert backward[PRODUCTS].operations == 6
    assert forward[PRODUCTS].flops == 3 * 2 * rows * hidden * inner
    assert backward[PRODUCTS].flops == 2 * forward[PRODUCTS].flops
    assert forward[PRODUCTS].bytes == 3 * 2 * (matrices + rows * (hidden + inner)) + 3 * 4 * 128
    fewer = count(8)
    for whole, part in zip((forward, backward), fewer, strict=True):
        assert [one.operations for one in whole.values()] == [one.operations for one in part.values()]

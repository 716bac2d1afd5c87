"""GPT-2, Llama 2 and 3, Qwen 2.5 and 3 are settings of the one transformer, whose logits agree with those of the
library transformers within 1e-5.
"""

import pytest
import torch

from tests.model.families import CASES, SEQ_LEN, VOCAB, pair


@pytest.mark.parametrize(("family", "shape"), CASES)
def test_logits_equal_those_of_transformers_for_the_same_weights(family, shape):
    ours, theirs = pair(family, shape)
    tokens = torch.randint(VOCAB, (2, SEQ_LEN), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        got, want = ours(tokens), theirs(tokens).logits
    # Relative to the logits' size: both add hundreds of FP32 products, in different orders.
    assert (got - want).abs().max() <= 1e-5 * want.abs().max()

"""A packed sequence's logits and gradients are those of its documents alone, in every family."""

import copy

import pytest
import torch

from megamix.config import ModelConfig
from megamix.model import decoder
from megamix.model.context import find_documents
from megamix.model.transformer import Transformer
from tests.model.rounding import FP16_WIDE, UNIT

SEQ_LEN, VOCAB = 48, 83
LLAMA3 = {"rule": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_seq_len": 16}
FAMILIES = {
    "gpt2": {"norm": "layernorm", "rope": False, "activation": "gelu_tanh", "bias": True},
    "llama3": {"num_kv_heads": 2, "rope": {"scaling": LLAMA3}, "tie_embeddings": False},
    "qwen2": {"num_kv_heads": 2, "qkv_bias": True, "rope": {"scaling": {"rule": "linear", "factor": 3.0}}},
    "qwen3": {"num_kv_heads": 1, "qk_norm": "head", "head_dim": 16},
}
# Documents of each row as (first position, tokens); one goes on from the sequence before, one is a single token.
ROWS = [[(0, 5), (0, 20), (0, SEQ_LEN - 25)], [(9, 10), (0, 1), (0, SEQ_LEN - 11)]]
POSITIONS = torch.stack([torch.cat([torch.arange(first, first + n) for first, n in row]) for row in ROWS])
TOKENS = torch.randint(VOCAB, (2, SEQ_LEN + 1), generator=torch.Generator().manual_seed(1))


def model_of(family, dtype=torch.float32):
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "seq_len": SEQ_LEN, "hidden_size": 32, "num_layers": 2, "num_heads": 4}
    model = Transformer(ModelConfig(**sizes, **FAMILIES[family]), FP16_WIDE)
    for parameter in model.parameters():
        parameter.data = (parameter.data * 8).to(dtype)  # attention that tells tokens apart
    return model


def alone(model):
    """Return the logits of all documents, and the sum of their losses, from forwards over one document each."""
    logits, losses = [], []
    for tokens, row in zip(TOKENS, ROWS, strict=True):
        start = 0
        for first, num_tokens in row:
            inside = slice(start, start + num_tokens)
            positions = torch.arange(first, first + num_tokens)[None]
            logits.append(model(tokens[:-1][inside][None], positions=positions)[0])
            losses.append(num_tokens * model(tokens[:-1][inside][None], tokens[1:][inside][None], positions))
            start += num_tokens
    return torch.cat(logits), sum(losses)


@pytest.fixture(params=[False, True], ids=["by document", "by mask"])
def as_masks(request, monkeypatch):
    """Return a function that makes documents masks, as on a GPU and in compiled code, or leaves them as they are."""

    def find(positions, as_mask):
        return find_documents(positions, as_mask or request.param)

    return lambda: monkeypatch.setattr(decoder, "find_documents", find)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_documents_alone(as_masks, family):
    model = model_of(family)
    with torch.no_grad():
        want, _ = alone(model)
        exact, _ = alone(copy.deepcopy(model).double())
        as_masks()
        got = model(TOKENS[:, :-1], positions=POSITIONS).flatten(0, 1)
        unpacked = model(TOKENS[:, :-1]).flatten(0, 1)
    # FP32 products over other numbers of rows are summed in another order, each as far from FP64 as the next: on one
    # machine or another up to 1.6e-4 of the largest logit, where a wrong document is 1e-2 away.
    assert (got - exact).abs().max() <= 4 * (want - exact).abs().max()
    assert (unpacked - want).abs().max() > 1e-2 * want.abs().max()  # the documents do matter


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_in_half_as_well_with_the_sum_of_their_losses_and_gradients(as_masks, dtype):
    model = model_of("qwen3", dtype)
    parameters = [*model.parameters()]
    want = alone(model)[1] / TOKENS[:, 1:].numel()
    want_grads = torch.autograd.grad(want, parameters, torch.tensor(64.0))
    as_masks()
    got = model(TOKENS[:, :-1], TOKENS[:, 1:], POSITIONS)
    got_grads = torch.autograd.grad(got, parameters, torch.tensor(64.0))
    # About 30 roundings to half lie between loss and embedding; alone, gradients are rounded once a document more.
    assert got.item() == pytest.approx(want.item(), rel=2 * UNIT[dtype])
    for one, other in zip(got_grads, want_grads, strict=True):
        assert (one.float() - other.float()).norm() <= 30 * UNIT[dtype] * other.float().norm()


def test_sequences_of_one_document_each_are_as_without_positions():
    positions = torch.arange(SEQ_LEN).expand(2, -1)
    assert find_documents(positions, as_mask=False) is None
    model = model_of("llama3")
    assert torch.equal(model(TOKENS[:, :-1], positions=positions), model(TOKENS[:, :-1]))
    assert [*find_documents(POSITIONS, as_mask=False).lengths] == [n for row in ROWS for _, n in row]

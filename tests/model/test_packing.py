"""A packed sequence's logits and gradients are those of its documents alone, in every family."""

import copy

import pytest
import torch

from megamix.model import decoder as module
from megamix.model.context import find_documents
from megamix.model.transformer import Transformer
from tests.model.families import CASES, SEQ_LEN, VOCAB, config_of
from tests.model.rounding import FP16_WIDE, UNIT

# Documents of each row as (first position, tokens); one goes on from the sequence before, one is a single token.
ROWS = [[(0, 5), (0, 20), (0, SEQ_LEN - 25)], [(9, 10), (0, 1), (0, SEQ_LEN - 11)]]
POSITIONS = torch.stack([torch.cat([torch.arange(first, first + n) for first, n in row]) for row in ROWS])
TOKENS = torch.randint(VOCAB, (2, SEQ_LEN + 1), generator=torch.Generator().manual_seed(1))


def model_of(family, shape, dtype=torch.float32):
    torch.manual_seed(0)
    model = Transformer(config_of(family, shape), FP16_WIDE)
    for parameter in model.parameters():
        parameter.data = (parameter.data * 8).to(dtype)  # attention that tells tokens apart
    return model


def alone(model, targets=False):
    """Return each document's logits, or its summed loss, from a forward over that document alone."""
    results = []
    for tokens, row in zip(TOKENS, ROWS, strict=True):
        start = 0
        for first, num_tokens in row:
            inside = slice(start, start + num_tokens)
            positions = torch.arange(first, first + num_tokens)[None]
            if targets:
                loss = model(tokens[:-1][inside][None], tokens[1:][inside][None], positions)
                results.append(loss * num_tokens)
            else:
                results.append(model(tokens[:-1][inside][None], positions=positions)[0])
            start += num_tokens
    return results


def as_masks(monkeypatch):
    """Make documents masks, as on a GPU and in compiled code."""
    monkeypatch.setattr(module, "find_documents", lambda positions, as_mask: find_documents(positions, True))


@pytest.mark.uncounted
@pytest.mark.parametrize("masked", [False, True], ids=["by document", "by mask"])
@pytest.mark.parametrize(("family", "shape"), CASES)
def test_logits_are_those_of_the_documents_alone(monkeypatch, family, shape, masked):
    model = model_of(family, shape)
    with torch.no_grad():
        want = torch.cat(alone(model))
        exact = torch.cat(alone(copy.deepcopy(model).double()))
        if masked:
            as_masks(monkeypatch)
        got = model(TOKENS[:, :-1], positions=POSITIONS).flatten(0, 1)
        unpacked = model(TOKENS[:, :-1]).flatten(0, 1)
    # FP32 products over other numbers of rows are summed in another order, each as far from FP64 as the next: on one
    # machine or another up to 1.6e-4 of the largest logit, where a wrong document is 1e-2 away.
    assert (got - exact).abs().max() <= 4 * (want - exact).abs().max()
    assert (unpacked - want).abs().max() > 1e-2 * want.abs().max()  # the documents do matter


@pytest.mark.parametrize("masked", [False, True], ids=["by document", "by mask"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_in_half_as_well_with_the_sum_of_their_losses_and_gradients(monkeypatch, dtype, masked):
    model = model_of("qwen3", "grouped", dtype)
    parameters = [*model.parameters()]
    want = sum(alone(model, targets=True), start=torch.zeros(())) / TOKENS[:, 1:].numel()
    want_grads = torch.autograd.grad(want, parameters, torch.tensor(64.0))
    if masked:
        as_masks(monkeypatch)
    got = model(TOKENS[:, :-1], TOKENS[:, 1:], POSITIONS)
    got_grads = torch.autograd.grad(got, parameters, torch.tensor(64.0))
    # About 30 roundings to half lie between loss and embedding; alone, gradients are rounded once a document more.
    assert got.item() == pytest.approx(want.item(), rel=2 * UNIT[dtype])
    for one, other in zip(got_grads, want_grads, strict=True):
        assert (one.float() - other.float()).norm() <= 30 * UNIT[dtype] * other.float().norm()


def test_sequences_of_one_document_each_are_as_without_positions():
    positions = torch.arange(SEQ_LEN).expand(2, -1)
    assert find_documents(positions, as_mask=False) is None
    model = model_of("llama3", "grouped")
    assert torch.equal(model(TOKENS[:, :-1], positions=positions), model(TOKENS[:, :-1]))
    lengths = [n for row in ROWS for _, n in row]
    documents = find_documents(POSITIONS, as_mask=False)
    assert documents is not None
    assert [*documents.lengths] == lengths


@pytest.mark.uncounted
def test_a_compiled_block_takes_documents_as_a_mask_and_any_packing_with_one_graph():
    graphs = []

    def collect(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    model = model_of("llama3", "square")
    with torch.no_grad():
        want = [model(TOKENS[:, :-1], positions=positions) for positions in (POSITIONS, POSITIONS.flip(0))]
        for block in model.blocks:
            block.compile(dynamic=False, backend=collect)
        model.is_compiled = True
        got = [model(TOKENS[:, :-1], positions=positions) for positions in (POSITIONS, POSITIONS.flip(0))]
    assert len(graphs) == 1
    for one, other in zip(got, want, strict=True):
        assert (one - other).abs().max() <= 1e-5 * other.abs().max()
    torch._dynamo.reset()

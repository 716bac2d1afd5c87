"""Packed documents can be given by their borders, as on a GPU in half: attention and its gradients equal those with a
mask within one rounding, whatever the packing; one graph serves all; recompute changes no bit; attention that cannot
take borders uses a mask.
"""

from unittest import mock

import pytest
import torch

from megamix.config import ModelConfig
from megamix.model import context, decoder, ops
from megamix.model.context import find_borders, find_documents
from megamix.model.ops import Ops, takes_borders
from megamix.model.transformer import Transformer
from tests.model.flash import stand_in
from tests.model.rounding import FP16_WIDE, UNIT, randn

B, T, ROOM = 2, 48, 12  # sequences, tokens of each, documents that borders have room for
VOCAB = 83
LENGTHS = {
    "one a sequence": [[48], [48]],
    "of one token": [[1, 46, 1], [1, 1, 1, 45]],
    "as many as there is room for": [[8] * 6, [40, 3, 1, 1, 1, 2]],
    "of other lengths": [[5, 20, 23], [31, 17]],
}
HALF = (torch.float16, torch.bfloat16)


def positions_of(lengths, first=0):
    """`first`: of the first document, which may go on from the sequence before."""
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    positions[0, : lengths[0][0]] += first
    return positions


@pytest.fixture(autouse=True)
def on_a_gpu(monkeypatch):
    """Make a CPU run as a GPU does: with kernels that take borders, and room for some in short sequences."""
    monkeypatch.setattr(context, "TOKENS_A_BORDER", B * T // ROOM)
    monkeypatch.setattr(decoder, "takes_borders", lambda x, head_dim: head_dim > 0 and x.dtype in HALF)
    with stand_in():
        yield
    torch._dynamo.reset()


def bounded_by_the_mask(inputs, upstream, borders, mask, *, on_a_card=False):
    """Attention by borders and its gradients are those by the mask in FP64, but for roundings to half: of each result,
    of each head's in a group, and of the output that backward reads. A card's kernels multiply halves: they round
    weights and slopes, too.
    """
    found = []
    for documents, given in ((borders, inputs), (mask, [x.double() for x in inputs])):
        leaves = [x.detach().requires_grad_() for x in given]
        out = Ops().attention(*leaves, documents)
        found.append([out, *torch.autograd.grad(out, leaves, upstream.to(out.dtype))])
    for one, exact in zip(*found, strict=True):
        assert one.shape == exact.shape
        assert (one.double() - exact).norm() <= (8 if on_a_card else 2) * UNIT[upstream.dtype] * exact.norm()


@pytest.mark.parametrize("knows_groups", sorted({False, ops._VARLEN_KNOWS_GROUPS}))  # torch 2.11, and 2.12
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("packing", LENGTHS)
def test_attention_and_its_gradients_are_those_of_the_mask(monkeypatch, packing, dtype, kv_heads, knows_groups):
    monkeypatch.setattr(ops, "_VARLEN_KNOWS_GROUPS", knows_groups)
    positions = positions_of(LENGTHS[packing], first=3)
    borders, mask = find_borders(positions), find_documents(positions, as_mask=True)
    assert borders.borders.shape == (ROOM + 1,)
    shapes = [(B, T, heads, 16) for heads in (4, kv_heads, kv_heads)]
    inputs = [randn(*shape, seed=seed, dtype=dtype).transpose(1, 2) for seed, shape in enumerate(shapes)]
    upstream = randn(B, T, 4, 16, seed=9, dtype=dtype).transpose(1, 2)
    bounded_by_the_mask(inputs, upstream, borders, mask)


def _model(recompute="none", dtype=torch.bfloat16):
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "seq_len": T, "hidden_size": 24, "num_layers": 2, "num_heads": 4, "num_kv_heads": 1}
    return Transformer(ModelConfig(**sizes, head_dim=16, qk_norm="head", recompute=recompute), FP16_WIDE).to(dtype)


TOKENS = torch.randint(VOCAB, (B, T + 1), generator=torch.Generator().manual_seed(1))


def _trained(model, lengths, num_documents):
    """Return loss and gradients."""
    loss = model(TOKENS[:, :-1], TOKENS[:, 1:], positions_of(lengths), num_documents)
    return [loss, *torch.autograd.grad(loss, [*model.parameters()], torch.tensor(64.0))]


@pytest.mark.parametrize("dtype", HALF)
def test_a_model_is_trained_as_by_the_mask(monkeypatch, dtype):
    model, lengths = _model(dtype=dtype), LENGTHS["of other lengths"]
    with mock.patch.object(decoder, "find_documents", side_effect=AssertionError("a mask")):
        got = _trained(model, lengths, 5)
    monkeypatch.setattr(decoder, "find_documents", lambda positions, as_mask: find_documents(positions, True))
    want = _trained(model, lengths, 0)
    for one, other in zip(got, want, strict=True):  # about 30 roundings to half between loss and embedding
        assert (one.float() - other.float()).norm() <= 30 * UNIT[dtype] * other.float().norm()


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recompute_changes_no_bit(recompute):
    lengths = LENGTHS["of other lengths"]
    want, got = (_trained(_model(policy), lengths, 5) for policy in ("none", recompute))
    assert all(map(torch.equal, got, want))


def test_positions_of_one_row_are_those_of_every_sequence():
    model, rows = _model(), positions_of([[5, 20, 23]] * B)
    for most in (3 * B, 0):  # by borders, and by lengths
        want, *got = (
            model(TOKENS[:, :-1], TOKENS[:, 1:], row, most) for row in (rows, rows[:1], rows[0], rows[0].expand(B, T))
        )
        assert all(torch.equal(one, want) for one in got)


def test_one_graph_serves_every_packing_and_the_mask_is_left_to_those_of_too_many_documents():
    graphs, model = [], _model()

    def collect(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    want = [_trained(model, lengths, sum(map(len, lengths))) for lengths in LENGTHS.values()]
    for block in model.blocks:
        block.compile(dynamic=False, backend=collect, fullgraph=True)
    model.is_compiled = True
    got = [_trained(model, lengths, sum(map(len, lengths))) for lengths in LENGTHS.values()]
    assert len(graphs) == 1
    for ones, others in zip(got, want, strict=True):
        for one, other in zip(ones, others, strict=True):
            assert (one.float() - other.float()).norm() <= 30 * UNIT[torch.bfloat16] * other.float().norm()
    many = [[1] * 7 + [41], [1] * 6 + [42]]
    _trained(model, many, ROOM + 2)
    assert len(graphs) == 2


@pytest.mark.parametrize(
    ("dtype", "head_dim", "takes"),
    [
        (torch.bfloat16, 256, True),
        (torch.float32, 64, False),
        (torch.float16, 20, False),
        (torch.float16, 264, False),
        (torch.float16, 0, False),
    ],
)
def test_borders_are_for_half_and_heads_that_the_kernels_know(dtype, head_dim, takes):
    assert takes_borders(torch.empty(1, dtype=dtype, device="meta"), head_dim) is takes
    assert not takes_borders(torch.empty(1, dtype=dtype), head_dim)

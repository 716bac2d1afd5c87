"""Whoever ties weights in a way of his own: two Parameters that share elements, such as a head with the data of an
embedding, are refused by both names if the engine would untie them; slices of one vector, one file or one matrix, and
expanded tensors, are accepted.
"""

import pytest
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from megamix.mixed_precision.weights import without_values
from tests.builders import bf16_engine, make_model


def _same_data(model):
    model.head.weight = nn.Parameter(model.embedding.weight.data)


def _frozen_view(model):
    model.head.weight = nn.Parameter(model.embedding.weight.data, requires_grad=False)


def _rows_of_two(model):
    rows = torch.randn(40, 24)
    model.embedding.weight = nn.Parameter(rows[:29])
    model.head.weight = nn.Parameter(rows[11:])


def _transposed(model):
    model.blocks[1].down.weight = nn.Parameter(model.blocks[0].up.weight.data.T)


def _one_column(model):
    model.blocks[2].norm.bias = nn.Parameter(model.embedding.weight.data[:24, 3])


def _buffer(model):
    model.register_buffer("table", model.embedding.weight.data[3])


@pytest.mark.parametrize(
    ("tie", "names"),
    [
        (_same_data, "embedding.weight and head.weight"),
        (_frozen_view, "embedding.weight and head.weight"),
        (_rows_of_two, "embedding.weight and head.weight"),
        (_transposed, "blocks.0.up.weight and blocks.1.down.weight"),
        (_one_column, "blocks.2.norm.bias and embedding.weight"),
        (_buffer, "embedding.weight and table"),
    ],
)
def test_tensors_that_share_elements_are_refused_by_both_names(tie, names):
    model = make_model(tied=False)
    tie(model)
    with pytest.raises(ValueError, match=rf"{names} share .* one Parameter, module.weight = other.weight"):
        bf16_engine(model)


def _one_vector(model, folder):
    vector_to_parameters(parameters_to_vector(model.parameters()), model.parameters())


def _one_file(model, folder):
    torch.save(model.state_dict(), folder / "weights.pt")
    model.load_state_dict(torch.load(folder / "weights.pt", mmap=True), assign=True)


def _columns(model, folder):
    both = torch.randn(29, 48)
    model.embedding.weight = nn.Parameter(both[:, :24])
    model.head.weight = nn.Parameter(both[:, 24:])


@pytest.mark.parametrize("share", [_one_vector, _one_file, _columns])
def test_disjoint_parts_of_one_memory_train(share, tmp_path):
    model = make_model(tied=False)
    share(model, tmp_path)
    before = [weight.clone() for weight in model.state_dict().values()]
    assert all(map(torch.equal, bf16_engine(model).full_weights().values(), before))


def test_tied_parameters_and_such_without_values_train():
    model = make_model()
    without_values(model, torch.device("cpu"))
    engine = bf16_engine(model, fill=lambda spec, start, master: master.fill_(1.0))
    assert float(engine.full_weights()["norm.weight"].sum()) == 24
    one = nn.Parameter(torch.zeros(()).expand(24))
    model = make_model()
    model.norm.weight, model.blocks[0].norm.bias = one, nn.Parameter(one.data)
    bf16_engine(model, fill=lambda spec, start, master: master.fill_(1.0))

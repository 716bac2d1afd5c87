"""`verify --trainer` compares every rank's buffers with the plain model's before the first step, in the dtype that is
kept: a wrong, lost or missing buffer is named, one that is merely rounded by its dtype is noted.
"""

import pytest
import torch

from megamix.tools.verify.core.table import result_lines
from megamix.tools.verify.core.verdict import Verdict
from megamix.tools.verify.foreign.judge_buffers import check_first_buffers
from megamix.tools.verify.foreign.judge_trainer import judge_trainer
from megamix.tools.verify.foreign.trainer import load_trainer
from megamix.tools.verify.foreign.watch import SeenStep, watch_trainer
from tests.tools.verify.catalogue.foreign import ByHand

TABLE = 1e4 ** -(torch.arange(8) / 8)


def _seen(buffers):
    return SeenStep(
        told={}, weights={}, states={}, buffers=buffers, updates=[], gradients={}, options={}, loss_scale=1.0,
        dtypes={}, tape={}, autocast=set(),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("kept", "told"),
    [
        (TABLE, None),
        (TABLE.bfloat16(), None),
        (TABLE.bfloat16().float(), "rounded to BF16, as parameters are"),
        (TABLE * 1.7, "1.7 times the right one"),
        (TABLE**1.25, "the right one to the power of 1.25, as rotary frequencies of another base"),
        (torch.zeros(8), "nothing but zeros"),
        (torch.full((8,), torch.nan), "memory that nobody has filled, as to_empty() leaves it"),
        (TABLE.sin(), "that of sines"),
        (TABLE.flip(0), "other values in 100% of its elements"),
        (TABLE[:4], "of shape (8,) in the plain model, and here of shape (4,)"),
        (None, "of shape (8,) in the plain model, and here there is none"),
        (torch.polar(torch.ones(8), TABLE), None),
    ],
)
def test_a_buffer_is_compared_in_the_dtype_that_is_kept(kept, told):
    right = torch.polar(torch.ones(8), TABLE) if kept is not None and kept.is_complex() else TABLE
    plain = {"table": right, "sines": TABLE.sin(), "mask": torch.ones(3, dtype=torch.bool)}
    mine = plain | {"table": kept} if kept is not None else {name: plain[name] for name in ("sines", "mask")}
    verdict = Verdict()
    check_first_buffers(verdict, plain, [_seen(plain), _seen(mine)])
    assert [(one.where, one.looks_like) for one in verdict.differences] == ([("table on rank 1", told)] if told else [])
    rounded = kept is not None and kept.dtype == torch.bfloat16
    assert bool(verdict.left) == rounded


class Kept(ByHand):
    """Training whose running statistics go on, and whose table is kept in BF16."""

    batch_norm = True

    def model(self):
        net = super().model()
        net.register_buffer("table", TABLE.repeat(2))
        net.embed.register_forward_hook(lambda module, args, out: out + net.table.to(out.dtype))
        return net

    def wrap(self, model):
        model.table = model.table.bfloat16()
        model.embed._forward_hooks.clear()
        model.embed.register_forward_hook(lambda module, args, out: out + model.table.to(out.dtype))
        model.register_buffer("of_the_wrapper", torch.zeros(2))
        return model


class Corrected(ByHand):
    """Training whose router's bias moves with every update, by no forward."""

    def model(self):
        net = super().model()
        net.register_buffer("router_bias", torch.zeros(4))
        return net

    def update(self):
        super().update()
        self.module.router_bias += torch.tensor([1e-3, 0.0, 0.0, -1e-3])


@pytest.mark.parametrize(
    ("name", "notes"),
    [
        (
            "Kept",
            {
                "  initial buffer of 1 tensor(s): rounded to BF16, as it is kept, and compared so",
                "  initial buffer of 1 tensor(s): not compared: the plain model has none of this name",
            },
        ),
        (
            "Corrected",
            {"  buffer of 1 tensor(s): not compared: your step moves it, the plain model's forward does not"},
        ),
    ],
)
def test_what_is_rounded_added_or_moved_on_purpose_is_noted_and_passes(run_ranks, name, notes):
    where = f"{__file__}:{name}"
    verdict = judge_trainer(load_trainer(where), run_ranks(watch_trainer, 1, where, 3))
    assert verdict.differences == []
    assert {str(line) for line in result_lines("1", "cpu", verdict)} >= notes

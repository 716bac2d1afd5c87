"""A job with products in FP8, from its file: the log names the layers, and a run that stops goes on bit for bit."""

import contextlib
import io
from unittest import mock

import pytest

from megamix.config import FP8Config, config_to_toml, load_config
from megamix.model import fp8
from tests.builders import run_on_ranks, tiny_job, write_data
from tests.train.outcome import differences, end_of


def trained(file, *changes):
    """Train the job of a file on this rank. Return what it says, and the number of its products in FP8."""
    said = io.StringIO()
    with mock.patch.object(fp8, "product", wraps=fp8.product) as products, contextlib.redirect_stdout(said):
        run_on_ranks(load_config(file, changes))
    return said.getvalue(), products.call_count


@pytest.mark.uncounted
def test_a_job_names_its_layers_and_goes_on_bit_for_bit(run_ranks, tmp_path):
    write_data(tmp_path / "data")
    files = {}
    for name in ("whole", "parts"):
        job = tiny_job(
            tmp_path / name, tokens=tmp_path / "data", ffn_hidden_size=64, tp_size=2,
            dtype="bf16", decay_style="constant", warmup_steps=1,
            steps=2, global_batch_size=4, eval_interval=1, log_interval=1,
        ).with_keys(precision={"fp8": FP8Config(recipe="rowwise", weight_grad="fp8", but=("blocks.0.*",))})  # fmt: skip
        files[name] = tmp_path / f"{name}.toml"
        files[name].write_text(config_to_toml(job))
    (said, products), (_, of_other_rank) = run_ranks(trained, 2, files["whole"])
    layers = "attention.query, attention.key, attention.value, attention.out, feed_forward.gate, feed_forward.up, "
    assert f"products in FP8, rowwise, emulated on this CPU | {layers}feed_forward.down of layer 1 |" in said
    # Three products of each of the seven layers, in each of two micro-batches.
    assert products == of_other_rank >= 2 * 2 * 7 * 3
    for changes in (("training.steps=1",), ()):
        run_ranks(trained, 2, files["parts"], *changes)
    assert differences(end_of(tmp_path / "whole"), end_of(tmp_path / "parts")) == []

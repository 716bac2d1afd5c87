"""`verify` shortens what reaches beyond its short sequences, and says so: a rank that ignores a window is named."""

import pytest

from megamix.tools.verify.core.own_size import at_own_size, size_told
from tests.builders import tiny_job
from tests.model.their_models import SEQ_LEN, write_config
from tests.tools.verify.catalogue.run import judged_layouts
from tests.tools.verify.jobs import make_config

LONG = {"seq_len": 64, "window": {"sizes": [64, 0]}}
YARN = {"rope": {"scaling": {"rule": "yarn", "factor": 4.0}}}


def test_a_rank_that_ignores_a_long_window_is_named(run_ranks):
    configs = [
        at_own_size(make_config(layout, dtype="bf16", loss_scale=4.0, model=LONG), [], [layout])  # of the widest bounds
        for layout in ("dp2", "cp2")
    ]
    bugs = ["", "", "window_ignored", "window_ignored"]
    *right, one, other = judged_layouts(run_ranks, 2, configs * 2, bugs, None, 1)
    assert [verdict.differences for verdict in right] == [[], []]
    assert one.differences[0].check == other.differences[0].check == "gradient"


@pytest.mark.parametrize(
    ("model", "overrides", "told"),
    [
        (LONG, [], "model.seq_len=24 model.window.sizes=[8, 0]"),
        (LONG | {"window": {"sizes": [64, 5]}}, [], "model.seq_len=24 model.window.sizes=[8, 5]"),
        (LONG, ["model.window.sizes=[64, 0]"], "model.seq_len=24 model.window.sizes=[64, 0]"),
        (LONG, ["model.seq_len=64"], "model.seq_len=64 model.window.sizes=[21, 0]"),
        ({"seq_len": 2, "window": {"sizes": [2]}}, [], "model.seq_len=2 model.window.sizes=[1]"),
        (LONG | {"window": {"sizes": [0]}}, [], "model.seq_len=24"),
        (YARN, [], "model.seq_len=8 model.rope.scaling.original_seq_len=8"),
        (YARN, ["model.rope.scaling.original_seq_len = 8192"],
         "model.seq_len=8 model.rope.scaling.original_seq_len=8192"),
        ({"rope": {"scaling": {"rule": "linear", "factor": 4.0}}}, [], "model.seq_len=8"),
    ],
)  # fmt: skip
def test_what_reaches_beyond_a_sequence_is_shortened_and_told(model, overrides, told):
    size = size_told(at_own_size(make_config("dp1", model=model), overrides))
    assert size == f"at training.micro_batch_size=2 {told} (overrides take another size)"


def _theirs(folder, kind, **keys):
    written = write_config(folder, kind, **keys)
    return at_own_size(
        tiny_job(folder, model={"family": "transformers", "folder": str(written), "seq_len": SEQ_LEN}), []
    )


def test_windows_of_a_model_of_transformers_are_shortened(tmp_path):
    windowed = _theirs(tmp_path, "gemma3_text", sliding_window=4096)
    assert windowed.model.theirs.sliding_window == 8
    assert "model.seq_len=24 sliding_window=8 (" in size_told(windowed)
    whole = _theirs(tmp_path, "olmo2")
    assert "model.seq_len=24 (" in size_told(whole)

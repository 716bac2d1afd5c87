"""The log lines, the JSON and the event file agree; a line fits into 100 columns, and a row has its time and tokens."""

import dataclasses
import json
import math
import time
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import metadata

from megamix.base.console import COLUMNS
from megamix.config import load_config
from megamix.log.history import main_settings
from megamix.log.interval_report import StepMetrics
from megamix.log.metrics import (
    TAGS,
    LayerPrecision,
    MetricsWriter,
    format_lines,
    load_tag,
    load_tags,
)
from megamix.train.run_record import Progress, cut_logs
from tests.train.broken_disk import FULL, broken_disk

CONFIGS = Path(__file__).parents[2] / "configs"
METRICS = StepMetrics(
    loss=5.43215,
    lr=3e-4,
    grad_norm=0.8125,
    loss_scale=65536.0,
    skipped_steps=2,
    tokens_per_s=12345.6,
    mfu=0.4123,
    memory_gib=1.5,
    data_share=0.01,
    forward_backward_share=0.8,
    reduce_scatter_share=0.03,
    update_share=0.1,
    all_gather_share=0.02,
    eta_s=3723.4,
)


def rows(folder, tokens=0):
    """Return each row without its time, which is now, and its tokens, which are as told."""
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for row in found:
        assert abs(row.pop(TAGS["time"]) - time.time()) < 600
        assert row.pop(TAGS["tokens"]) == tokens
    return found


def _events(folder):
    """Return what TensorBoard reads."""
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return events


def test_the_console_line_says_what_moves_and_two_more_the_rest():
    line = "step   20/1000 | loss 5.4322 | lr 3.00e-04 | grad_norm 0.812 | scale 2^16 | 12,346 tokens/s"
    assert format_lines(20, 1000, METRICS, detailed=False) == line
    assert format_lines(20, 1000, METRICS, detailed=True).splitlines() == [
        line,
        "step   20/1000 | eta 1:02:03 | overflows 2 | mfu 41.2% | memory 1.50 GiB",
        "step   20/1000 | time: data 1%, fwd+bwd 80%, reduce-scatter 3%, update 10%, all-gather 2%",
    ]


def test_the_lines_of_a_large_run_fit_into_100_columns():
    large = dataclasses.replace(
        METRICS, loss=11.76234, grad_norm=99.9994, loss_scale=2.0**24, skipped_steps=1234, tokens_per_s=1_234_567.8,
        memory_gib=79.123, eta_s=3e6, data_share=0.2, forward_backward_share=0.2, reduce_scatter_share=0.2,
        update_share=0.2, all_gather_share=0.2, mfu=1.0,
    )  # fmt: skip
    assert max(map(len, format_lines(999_000, 999_999, large, detailed=True).splitlines())) <= COLUMNS == 100


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"mfu": None}, "| mfu n/a |"),
        ({"loss_scale": 0.5}, "| scale 2^-1 |"),
        ({"loss_scale": 1000.0}, "| scale 1000 |"),
        ({"grad_norm": math.inf}, "| grad_norm inf |"),
        ({"eta_s": 59.7}, "| eta 0:01:00"),
    ],
)
def test_the_console_line_says_what_is_absent_or_not_finite(change, words):
    assert words in format_lines(1, 10, dataclasses.replace(METRICS, **change), detailed=True)


def test_a_run_without_a_loss_scale_speaks_of_overflows_only_after_one():
    for skipped in (0, 3):
        plain = dataclasses.replace(METRICS, loss_scale=None, skipped_steps=skipped)
        told = format_lines(1, 10, plain, detailed=True)
        assert ("scale" in told, "overflows" in told) == (False, skipped > 0)


def test_a_router_that_collapses_is_told():
    even, uneven, collapsed = [5.0] * 8, [1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 36.0], [20.0, 20.0, *[0.01] * 6]
    for counts in ({"a": even}, {"a": uneven, "b": even}):
        lines = format_lines(20, 1000, METRICS, detailed=True, counts=counts).splitlines()
        assert len(lines) == 3
    lines = format_lines(20, 1000, METRICS, detailed=True, counts={"a": even, "b": collapsed}).splitlines()
    assert " | load 2.50" in lines[1]
    assert lines[3].strip() == "6 of 8 experts get no tokens in b, and half in 1 layer(s):"
    assert "raise model.experts.bias_rate" in lines[4]


def test_rows_are_on_disk_at_once_or_when_the_writer_ends_and_a_second_writer_appends(tmp_path):
    with MetricsWriter(tmp_path / "run", tensorboard=False) as writer:
        writer.write(10, dataclasses.asdict(METRICS))
        assert rows(tmp_path / "run")[0]["train/loss"] == 5.43215  # read while the writer is open
    no_json = {"lr": None, "grad_norm": math.inf, "loss": -math.inf, "loss_scale": math.nan}
    with broken_disk(tmp_path / "run") as disk, MetricsWriter(tmp_path / "run", tensorboard=False) as writer:
        disk.fault = FULL
        writer.write(20, {"valid_loss": 4.5, **no_json})
        disk.fault = None
    first, second = rows(tmp_path / "run")
    assert first["step"] == 10
    assert first["optim/loss_scale"] == 65536.0
    assert first["time_share/exposed_reduce_scatter"] == 0.03
    assert len(first) == 1 + len(dataclasses.asdict(METRICS))
    assert second == {"step": 20, "valid/loss": 4.5, **{TAGS[name]: None for name in no_json}}
    assert not (tmp_path / "run" / "tensorboard").exists()


def test_tensorboard_gets_the_same_tags_and_values_and_every_row_the_tokens_so_far(tmp_path):
    with MetricsWriter(tmp_path, tensorboard=True, tokens=lambda: 4096) as writer:
        for step in (10, 20):
            writer.write(step, dataclasses.asdict(METRICS) | {"loss": 1.0 / step, "mfu": None})
        writer.write_precision(20, {"embedding": LAYER})
    assert len(rows(tmp_path, tokens=4096)) == 3
    events = _events(tmp_path)
    named = {TAGS[name] for name in dataclasses.asdict(METRICS)} | {TAGS["tokens"]}
    scalars = {tag for tag in events.Tags()["scalars"] if not tag.startswith("precision/")}
    assert scalars == named - {"throughput/mfu"}
    points = [(event.step, event.value) for event in events.Scalars("train/loss")]
    assert points == [(10, pytest.approx(0.1, rel=1e-6)), (20, pytest.approx(0.05, rel=1e-6))]
    assert {event.value for event in events.Scalars("train/tokens")} == {4096.0}


SHARES = {"zero_share": 0.25, "subnormal_share": 0.5, "below_share": 0.0, "hidden_update_share": None}
UNSCALED = {"unscaled_subnormal_share": 0.75, "unscaled_below_share": 0.125}
LAYER = LayerPrecision(**SHARES, **UNSCALED, headroom=-math.inf, exponents=(0, 2, *[0] * 54, 1, 0))


def test_an_examined_step_is_one_row_of_json_and_its_exponents_are_a_histogram(tmp_path):
    with MetricsWriter(tmp_path, tensorboard=True) as writer:
        writer.write_precision(100, {"embedding": LAYER, "blocks.0": dataclasses.replace(LAYER, headroom=3.5)})
    (row,) = rows(tmp_path)
    assert row.pop("step") == 100
    fields = [field.name for field in dataclasses.fields(LayerPrecision)]
    assert list(row) == [f"precision/{field}/{layer}" for layer in ("embedding", "blocks.0") for field in fields]
    assert row["precision/unscaled_below_share/embedding"] == 0.125
    assert row["precision/headroom/embedding"] is None
    assert row["precision/headroom/blocks.0"] == 3.5
    assert row["precision/exponents/embedding"] == list(LAYER.exponents)
    events = _events(tmp_path)
    assert [event.value for event in events.Scalars("precision/subnormal_share/blocks.0")] == [0.5]
    assert "precision/hidden_update_share/blocks.0" not in events.Tags()["scalars"]
    (event,) = events.Histograms("precision/exponents/blocks.0")
    found = dict(zip(event.histogram_value.bucket_limit, event.histogram_value.bucket, strict=True))
    # Limits are upper ones: two gradients from 2^-40 to 2^-39, one from 2^15 to 2^16.
    assert {limit: count for limit, count in found.items() if count} == {-39: 2, 16: 1}
    assert (event.step, event.histogram_value.num) == (100, 3)


def test_a_load_is_told_by_layer_and_its_counts_are_in_the_detailed_rows_alone(tmp_path):
    even, one, none = [6.0, 6.0, 6.0, 6.0], [0.0, 8.0, 0.0, 0.0], [0.0, 0.0]
    halves = load_tags({"blocks.1": [4.0, 4.0, 0.0, 0.0]}, detailed=False)
    assert halves == {"load/max/blocks.1": 2.0, "load/min/blocks.1": 0.0, "load/entropy/blocks.1": pytest.approx(0.5)}
    counts = {"blocks.1": even, "blocks.2": one, "blocks.3": none}
    with MetricsWriter(tmp_path, tensorboard=True) as writer:
        writer.write(10, {"loss": 5.0}, load_tags(counts, detailed=True))
    (row,) = rows(tmp_path)
    told = {layer: [row[load_tag(name, layer)] for name in ("max", "min", "entropy", "counts")] for layer in counts}
    assert told == {
        "blocks.1": [1.0, 1.0, 1.0, even],
        "blocks.2": [4.0, 0.0, pytest.approx(0.0, abs=1e-15), one],
        "blocks.3": [None, None, None, none],
    }
    events = _events(tmp_path)
    assert [event.value for event in events.Scalars("load/max/blocks.2")] == [4.0]
    assert "counts" not in str(events.Tags())


def test_lines_that_no_run_has_written_are_kept_and_not_told_again(tmp_path):
    noted = b'# a note of mine\n\n[3]\n{"train/loss": 1.0}\n'
    (tmp_path / "metrics.jsonl").write_bytes(noted)
    cut_logs(tmp_path, Progress())
    with MetricsWriter(tmp_path, tensorboard=True) as writer:
        writer.write(1, {"loss": 2.0})
    content = (tmp_path / "metrics.jsonl").read_bytes()
    assert content.startswith(noted)
    row = json.loads(content[len(noted) :])
    assert (row["step"], row["train/loss"]) == (1, 2.0)


def test_tensorboard_shows_configuration_and_sample_letter_by_letter_and_compares_runs(tmp_path):
    job = load_config(CONFIGS / "llama3.1-70b.toml", ["optimizer.lr=0.25", "precision.dtype=fp16"])
    settings = main_settings(job.text)
    config = "[model]\nseq_len = 8\n"
    with MetricsWriter(tmp_path, tensorboard=True, applied=7, config=config, hparams=settings) as writer:
        writer.text(9, "sample", "def f(*args):\n\n    return `x`")
    events = _events(tmp_path)
    said = {tag: events.Tensors(f"{tag}/text_summary")[0] for tag in ("config", "sample")}
    assert {tag: (event.step, event.tensor_proto.string_val[0].decode()) for tag, event in said.items()} == {
        "config": (7, "    [model]\n    seq_len = 8\n    "),  # Markdown's way to show text as it is
        "sample": (9, "    def f(*args):\n    \n        return `x`"),
    }
    content = {tag: it.plugin_data.content for tag, it in events.summary_metadata.items() if "hparams" in tag}
    begun = metadata.parse_session_start_info_plugin_data(content["_hparams_/session_start_info"]).hparams
    assert (begun["optimizer.lr"].number_value, begun["precision.dtype"].string_value) == (0.25, "fp16")
    assert begun["parallelism.tensor.size"].number_value == 8
    judged = metadata.parse_experiment_plugin_data(content["_hparams_/experiment"]).metric_infos
    assert [metric.name.tag for metric in judged] == ["valid/loss", "train/loss"]


def test_rows_of_buckets_are_cut_by_their_attempt_and_are_no_curves(tmp_path):
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        for attempt in (3, 4, 5):
            writer.append(4, {"communication/attempt": attempt, "communication/bucket": 0})
    cut_logs(tmp_path, Progress(applied=4, attempts=5))
    assert [row["communication/attempt"] for row in rows(tmp_path)] == [3, 4]
    MetricsWriter(tmp_path, tensorboard=True, applied=2).close()
    assert _events(tmp_path).Tags()["scalars"] == []


def test_a_start_s_row_is_cut_where_another_start_goes_on_from_the_same_checkpoint(tmp_path):
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        writer.append(4, {TAGS["loss"]: 2.0})
        writer.append(4, {TAGS["resumed"]: 1})
    cut_logs(tmp_path, Progress(applied=4, attempts=4))
    assert [TAGS["resumed"] in row for row in rows(tmp_path)] == [False]

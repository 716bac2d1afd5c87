"""The file for Prometheus is valid, in its names, types and units, at every instant; it says when the run has ended."""

import math
import re
from pathlib import Path

import pytest

from megamix.report.metrics import TAGS
from megamix.report.prometheus import PrometheusTracker

ROW = {
    TAGS["loss"]: 3.25,
    TAGS["memory_gib"]: 1.5,
    TAGS["tokens"]: 4096,
    TAGS["loss_scale"]: 1024.0,
    "time_share/data": 0.25,
    "time_share/update": 0.5,
    "valid/loss": 3.5,
    "valid/loss/web": 4.0,
    'mine "quoted" \\ and\nbroken': math.inf,
    "other": math.nan,
}
SAMPLE = re.compile(r'(megamix_[a-z_]+)\{run="((?:[^"\\\n]|\\.)*)"(?:,([a-z]+)="((?:[^"\\\n]|\\.)*)")?\} (\S+)')


def _tracker(folder):
    return PrometheusTracker(file=str(folder / "run.prom"), folder=Path("runs/mine"), config={})


def _samples(folder):
    """Return the file's values, by metric and label; every line of another form is an error."""
    found = {}
    described = []
    for line in (folder / "run.prom").read_text().splitlines():
        if line.startswith("#"):
            described.append(line.split(" ")[2])
            continue
        match = SAMPLE.fullmatch(line)
        assert match, line
        assert described[-2:] == [match[1]] * 2, "help and type come first, and a metric's samples together"
        assert match[2] == "runs/mine"
        found[match[1], match[4]] = float(match[5])
    assert len(described) == 2 * len({*described})
    return found


def test_values_have_prometheus_units_and_labels(tmp_path):
    tracker = _tracker(tmp_path)
    tracker.log(8, ROW)
    got = _samples(tmp_path)
    assert got.pop(("megamix_last_row_timestamp_seconds", None)) > 1e9
    assert math.isnan(got.pop(("megamix_value", "other")))
    assert got == {
        ("megamix_running", None): 1.0,
        ("megamix_loss_nats", None): 3.25,
        ("megamix_memory_peak_bytes", None): 1.5 * 2**30,
        ("megamix_tokens_total", None): 4096.0,
        ("megamix_loss_scale", None): 1024.0,
        ("megamix_time_share_ratio", "data"): 0.25,
        ("megamix_time_share_ratio", "update"): 0.5,
        ("megamix_valid_loss_nats", None): 3.5,
        ("megamix_valid_loss_nats", "web"): 4.0,
        ("megamix_value", r"mine \"quoted\" \\ and\nbroken"): math.inf,
        ("megamix_updates_total", None): 8.0,
    }


def test_an_overflow_is_no_update_and_the_end_is_told(tmp_path):
    tracker = _tracker(tmp_path)
    tracker.log(8, ROW)
    tracker.log(9, {TAGS["loss_scale"]: 512.0, TAGS["skipped_steps"]: 1})
    got = _samples(tmp_path)
    assert got["megamix_updates_total", None] == 8.0
    assert got["megamix_overflows_total", None] == 1.0
    assert got["megamix_loss_scale", None] == 512.0
    tracker.close()
    assert _samples(tmp_path)["megamix_running", None] == 0.0
    assert [path.name for path in tmp_path.iterdir()] == ["run.prom"], "it is renamed into place"


def test_the_client_of_prometheus_reads_it(tmp_path):
    parser = pytest.importorskip("prometheus_client.parser")
    tracker = _tracker(tmp_path)
    tracker.log(8, ROW)
    families = {family.name: family for family in parser.text_string_to_metric_families(_text(tmp_path))}
    assert {family.type for family in families.values()} == {"gauge", "counter"}
    labels = [sample.labels["tag"] for sample in families["megamix_value"].samples]
    assert labels == ['mine "quoted" \\ and\nbroken', "other"]
    assert all(family.documentation for family in families.values())


def _text(folder):
    return (folder / "run.prom").read_text()

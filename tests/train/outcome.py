"""Results of a run, as those that must be equal between an interrupted run and one that was not."""

import json

from megamix.checkpoint.folder import checkpoints
from megamix.checkpoint.manifest import read_manifest

TIMELESS = ("train/", "valid/", "optim/", "precision/", "load/")  # tags of metrics.jsonl that depend on no clock


def end_of(folder):
    """Return the results of the run in folder/run: weights, moments, scale, counters, place in the data, losses."""
    newest = checkpoints(folder / "run/checkpoints")[0]
    manifest = read_manifest(newest / "manifest.json")
    return {
        "files": [(file.name, (newest / file.name).read_bytes()) for file in manifest.files],
        "state": (manifest.applied_updates, manifest.skipped_steps, manifest.loss_scale, manifest.run.progress),
        "metrics": metrics_of(folder),
    }


def metrics_of(folder):
    """Return the rows of a run, but for those that only say that it went on."""
    lines = (folder / "run/metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if "run/resumed" not in row]
    return [{key: value for key, value in row.items() if key == "step" or key.startswith(TIMELESS)} for row in rows]


def differences(one, other):
    return [key for key in one if one[key] != other[key]]

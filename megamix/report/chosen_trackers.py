"""The trackers that a configuration chooses, of megamix's own and of plugins."""

from functools import partial
from pathlib import Path

from megamix.config import Config
from megamix.plugins import TRACKERS
from megamix.report.alerts import AlertTracker
from megamix.report.prometheus import PrometheusTracker
from megamix.report.trackers import TrackerThread, WandbTracker

TRACKERS.registered["wandb"] = WandbTracker
TRACKERS.registered["prometheus"] = PrometheusTracker
TRACKERS.registered["alert"] = AlertTracker


def start_trackers(config: Config) -> list[TrackerThread]:
    """Start the trackers that have a table [metrics.NAME]."""
    tables = {name: getattr(config.metrics, name, None) for name in TRACKERS.registered}
    about = {"folder": Path(config.checkpoint.folder), "config": config.model_dump(mode="json")}
    return [
        TrackerThread(name, partial(TRACKERS.registered[name], **dict(table), **about))
        for name, table in tables.items()
        if table is not None
    ]

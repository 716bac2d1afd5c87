"""The trackers that a configuration chooses, of megamix's own and of plugins."""

from functools import partial
from pathlib import Path

from megamix.config import Config
from megamix.plugins import TRACKERS
from megamix.report.alerts import AlertTracker
from megamix.report.prometheus import PrometheusTracker
from megamix.report.trackers import TrackerThread, WandbTracker

TRACKERS.registered.update(wandb=WandbTracker, prometheus=PrometheusTracker, alert=AlertTracker)


def start_trackers(config: Config) -> list[TrackerThread]:
    """Start the trackers that have a table [metrics.NAME]."""
    about = {"folder": Path(config.checkpoint.folder), "config": config.model_dump(mode="json")}
    return [
        TrackerThread(name, partial(build, **dict(table), **about))
        for name, build in TRACKERS.registered.items()
        if (table := getattr(config.metrics, name, None)) is not None
    ]

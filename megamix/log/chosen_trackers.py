"""The trackers that a configuration chooses, of megamix's own and of plugins."""

from functools import partial
from pathlib import Path

from megamix.config.choices import Tree
from megamix.config.sections import MetricsConfig
from megamix.log.alerts import AlertTracker
from megamix.log.prometheus import PrometheusTracker
from megamix.log.trackers import TrackerThread, WandbTracker
from megamix.plugins import TRACKERS

TRACKERS.registered.update(wandb=WandbTracker, prometheus=PrometheusTracker, alert=AlertTracker)


def start_trackers(section: MetricsConfig, folder: Path, tables: Tree) -> list[TrackerThread]:
    """Start the trackers that have a table [metrics.NAME]. `tables`: the whole configuration, for them to keep."""
    return [
        TrackerThread(name, partial(build, **dict(table), folder=folder, config=tables))
        for name, build in TRACKERS.registered.items()
        if (table := getattr(section, name, None)) is not None
    ]

"""megamix: mixed-precision pretraining with the FP32 truth sharded over data-parallel ranks.

The engine is a library, re-exported here; `megamix train CONFIG` runs whole jobs.
"""

import importlib
from typing import TYPE_CHECKING, Any

from megamix import schedules

if TYPE_CHECKING:
    from megamix.checkpoint.checkpoints import Checkpoints
    from megamix.comm.starters import start_ranks
    from megamix.comm.topology import Topology
    from megamix.inspect.records import record
    from megamix.mixed_precision.adamw import AdamW
    from megamix.mixed_precision.engine import ShardedEngine
    from megamix.mixed_precision.headroom import HeadroomLossScale
    from megamix.mixed_precision.loss_scale import (
        DeepSpeedLossScale,
        DynamicLossScale,
        LossScale,
        MegatronLossScale,
        StaticLossScale,
        TorchLossScale,
    )
    from megamix.mixed_precision.muon import Muon
    from megamix.mixed_precision.nag import NAG
    from megamix.mixed_precision.observer import StepObserver
    from megamix.mixed_precision.optimizers import Optimizer, ParamGroup
    from megamix.mixed_precision.settings import Precision, Sharding
    from megamix.mixed_precision.step import StepResult
    from megamix.tools.audit.audit import audit
    from megamix.tools.verify.trainer import ForeignTrainer

_STAGES = ("engine", "settings", "step", "loss_scale", "headroom", "optimizers", "adamw", "nag", "muon")
_HOMES = (*(f"mixed_precision.{stage}" for stage in _STAGES), "inspect.records", "checkpoint.checkpoints")
_HOMES += ("comm.topology", "comm.starters", "tools.verify.trainer", "tools.audit.audit")

__all__ = ["NAG", "AdamW", "Checkpoints", "DeepSpeedLossScale", "DynamicLossScale", "ForeignTrainer"]
__all__ += ["HeadroomLossScale", "LossScale", "MegatronLossScale", "Muon", "Optimizer", "ParamGroup", "Precision"]
__all__ += ["ShardedEngine", "Sharding", "StaticLossScale", "StepObserver", "StepResult", "Topology", "TorchLossScale"]
__all__ += ["audit", "record", "schedules", "start_ranks"]


def __getattr__(name: str) -> Any:
    # On first use: a wrong config file must be answered before the seconds that importing torch takes.
    if name in __all__:
        for home in _HOMES:
            module = importlib.import_module(f"megamix.{home}")
            if hasattr(module, name):
                return getattr(module, name)
    raise AttributeError(f"module 'megamix' has no attribute {name!r}")

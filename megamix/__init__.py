"""megamix: mixed-precision pretraining with the FP32 truth sharded over data-parallel ranks.

The engine is a library, re-exported here; `megamix train CONFIG` runs whole jobs.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megamix.mixed_precision.engine import ShardedEngine
    from megamix.mixed_precision.headroom import HeadroomLossScale
    from megamix.mixed_precision.loss_scale import (
        DeepSpeedLossScale,
        DynamicLossScale,
        MegatronLossScale,
        StaticLossScale,
        TorchLossScale,
    )
    from megamix.mixed_precision.optimizers import NAG, AdamW, ParamGroup
    from megamix.mixed_precision.records import record
    from megamix.mixed_precision.settings import Precision, Sharding
    from megamix.mixed_precision.step import StepResult

__all__ = ["NAG", "AdamW", "DeepSpeedLossScale", "DynamicLossScale", "HeadroomLossScale", "MegatronLossScale"]
__all__ += ["ParamGroup", "Precision", "ShardedEngine", "Sharding", "StaticLossScale", "StepResult", "TorchLossScale"]
__all__ += ["record"]


def __getattr__(name: str) -> Any:
    # On first use: a wrong config file must be answered before the seconds that importing torch takes.
    if name in __all__:
        for home in ("engine", "settings", "step", "loss_scale", "headroom", "optimizers", "records"):
            module = importlib.import_module(f"megamix.mixed_precision.{home}")
            if hasattr(module, name):
                return getattr(module, name)
    raise AttributeError(f"module 'megamix' has no attribute {name!r}")

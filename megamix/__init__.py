"""megamix: mixed-precision pretraining with FP32 master weights sharded over data-parallel ranks.

The engine is a library, re-exported here; `megamix train CONFIG` runs whole jobs.
"""

import importlib
from functools import cache
from typing import TYPE_CHECKING, Any

from megamix import schedules as schedules

# The one list of what is public. Type checkers and editors follow these lines; at run time a name is imported on its
# first use, by the same lines: a wrong config file must be answered before the seconds that importing torch takes.
if TYPE_CHECKING:
    from megamix.checkpoint.checkpoints import Checkpoints as Checkpoints
    from megamix.comm.starters import start_ranks as start_ranks
    from megamix.comm.topology import Topology as Topology
    from megamix.inspect.records import record as record
    from megamix.mixed_precision.adamw import AdamW as AdamW
    from megamix.mixed_precision.engine import ShardedEngine as ShardedEngine
    from megamix.mixed_precision.headroom import HeadroomLossScale as HeadroomLossScale
    from megamix.mixed_precision.loss_scale import DeepSpeedLossScale as DeepSpeedLossScale
    from megamix.mixed_precision.loss_scale import DynamicLossScale as DynamicLossScale
    from megamix.mixed_precision.loss_scale import LossScale as LossScale
    from megamix.mixed_precision.loss_scale import MegatronLossScale as MegatronLossScale
    from megamix.mixed_precision.loss_scale import StaticLossScale as StaticLossScale
    from megamix.mixed_precision.loss_scale import TorchLossScale as TorchLossScale
    from megamix.mixed_precision.muon import Muon as Muon
    from megamix.mixed_precision.nag import NAG as NAG
    from megamix.mixed_precision.observer import StepObserver as StepObserver
    from megamix.mixed_precision.optimizers import Optimizer as Optimizer
    from megamix.mixed_precision.optimizers import ParamGroup as ParamGroup
    from megamix.mixed_precision.settings import Precision as Precision
    from megamix.mixed_precision.settings import Sharding as Sharding
    from megamix.mixed_precision.step import StepResult as StepResult
    from megamix.tools.audit.audit import audit as audit
    from megamix.tools.verify.foreign.trainer import ForeignTrainer as ForeignTrainer


@cache
def _homes() -> dict[str, str]:
    """Return the module of each public name, from the lines above."""
    import ast  # here, for a command needs none of it

    with open(__file__, encoding="utf-8") as file:
        imports = [node for node in ast.walk(ast.parse(file.read())) if isinstance(node, ast.ImportFrom)]
    return {name.asname: str(line.module) for line in imports for name in line.names if name.asname}


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return sorted(_homes())
    if name not in _homes():
        raise AttributeError(f"module 'megamix' has no attribute {name!r}")
    return getattr(importlib.import_module(_homes()[name]), name)

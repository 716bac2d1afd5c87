# The one list of what is public, for type checkers and editors; `__init__.py` reads it, and imports a name on its first
# use. That is lazy loading by a stub, as in SPEC 1 of Scientific Python. Each line: from MODULE import NAME as NAME.
from megamix import schedules as schedules
from megamix.beside.added_loss import add_loss as add_loss
from megamix.beside.records import record as record
from megamix.beside.tally import Tally as Tally
from megamix.checkpoint.checkpoints import Checkpoints as Checkpoints
from megamix.comm.starters import start_ranks as start_ranks
from megamix.comm.topology import Topology as Topology
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

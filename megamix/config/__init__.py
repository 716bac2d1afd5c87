"""Configuration: TOML files and overrides in, typed frozen sections out. No torch here: a mistake shows at once.

load            from files and overrides to a `Config`: bases, dotted overrides, all problems in one exception
sections        the typed sections: a class for each table, a documented field for each key
model_and_data  the sections [model] and [data]
architecture    the section [model] of a model of transformers
optimizers      the sections of the update: keys of every optimizer, and of each
loss_scales     the section [precision.loss_scale]: keys of each rule
choices         tables whose keys depend on what is chosen or registered
batch_ramp      sizes of global batches, and the tokens of updates
checks          checks over more than one field, by topic
mesh_checks     checks of the mesh of ranks and of a pipeline's schedule
unread          keys that are read only where another key says so
problems        problems in words: field, value and fix
other_trainers  keys of other trainers, and what they are called here: a file of names
toml_text       a whole configuration as TOML
command         the verb
"""

from megamix.config.architecture import TransformersConfig as TransformersConfig
from megamix.config.architecture import architecture as architecture
from megamix.config.architecture import first_weights as first_weights
from megamix.config.batch_ramp import batch_size as batch_size
from megamix.config.batch_ramp import tokens_of as tokens_of
from megamix.config.checks import check_world_size as check_world_size
from megamix.config.checks import grad_accum_steps as grad_accum_steps
from megamix.config.checks import model_problems as model_problems
from megamix.config.load import config_from_dict as config_from_dict
from megamix.config.load import effective_tables as effective_tables
from megamix.config.load import load_config as load_config
from megamix.config.loss_scales import loss_scale_rule as loss_scale_rule
from megamix.config.mesh_checks import AXIS_KEYS as AXIS_KEYS
from megamix.config.mesh_checks import axis_sizes as axis_sizes
from megamix.config.mesh_checks import data_parallel_size as data_parallel_size
from megamix.config.mesh_checks import evaluated_at_once as evaluated_at_once
from megamix.config.mesh_checks import reading_ranks as reading_ranks
from megamix.config.mesh_checks import stages_per_rank as stages_per_rank
from megamix.config.model_and_data import FAMILY as FAMILY
from megamix.config.model_and_data import DataSource as DataSource
from megamix.config.model_and_data import DecoderConfig as DecoderConfig
from megamix.config.model_and_data import ExpertsConfig as ExpertsConfig
from megamix.config.model_and_data import FirstLayers as FirstLayers
from megamix.config.model_and_data import LatentSizes as LatentSizes
from megamix.config.model_and_data import ModelConfig as ModelConfig
from megamix.config.model_and_data import RopeScaling as RopeScaling
from megamix.config.model_and_data import data_source as data_source
from megamix.config.model_and_data import default_ffn_hidden_size as default_ffn_hidden_size
from megamix.config.model_and_data import whole_weights as whole_weights
from megamix.config.optimizers import OptimizerConfig as OptimizerConfig
from megamix.config.problems import ConfigError as ConfigError
from megamix.config.problems import nearest as nearest
from megamix.config.problems import override_meant as override_meant
from megamix.config.sections import Config as Config
from megamix.config.sections import FP8Config as FP8Config
from megamix.config.sections import ParallelismConfig as ParallelismConfig
from megamix.config.sections import PrecisionConfig as PrecisionConfig
from megamix.config.sections import config_schema as config_schema
from megamix.config.toml_text import config_to_toml as config_to_toml

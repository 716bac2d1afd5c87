"""Configuration: TOML files and overrides in, typed frozen sections out. It imports `settings`, `plugins` and `base`,
and no torch: a mistake shows at once. Begin with `sections`.

load            from files and overrides to a `Config`: bases, dotted overrides, all problems in one exception
sections        the typed sections: a class for each table, a documented field for each key
model_and_data  the sections [model] and [data]
architecture    the section [model] of a model of transformers
optimizers      the sections of the update: keys of every optimizer, and of each
loss_scales     the section [precision.loss_scale]: keys of each rule
choices         tables whose keys depend on what is chosen or registered
pace            length of a run, sizes of its global batches, tokens of its updates
checks          checks over more than one field, by topic
mesh_checks     checks of the mesh of ranks and of a pipeline's schedule
unread          keys that are read only where another key says so
old_keys        keys that were, and what they are now: a file of names
problems        problems in words: field, value and fix
other_trainers  keys of other trainers, and what they are called here: a file of names
toml_text       tables of a configuration as TOML
config          a whole configuration, and its canonical text
diff            what differs between two, and what may
"""

# These names are exported.
# ruff: noqa: F401
# mypy: implicit-reexport

from megamix.config.architecture import TransformersConfig, architecture, first_weights
from megamix.config.checks import check_world_size, grad_accum_steps, model_problems
from megamix.config.config import Config, config_schema, effective_tables, values_of
from megamix.config.load import config_from_dict, config_of_run, load_config
from megamix.config.loss_scales import loss_scale_rule
from megamix.config.mesh_checks import (
    axis_key,
    axis_sizes,
    axis_table,
    data_parallel_size,
    evaluated_at_once,
    ranks_along,
    reading_ranks,
    resized,
    stages_per_rank,
)
from megamix.config.model_and_data import (
    FAMILY,
    DataSource,
    DecoderConfig,
    ExpertGroups,
    ExpertsConfig,
    FirstLayers,
    LatentSizes,
    Llama3Scaling,
    ModelConfig,
    RopeConfig,
    RopeScaling,
    WindowConfig,
    YarnScaling,
    data_source,
    default_ffn_hidden_size,
    whole_weights,
)
from megamix.config.old_keys import saved_tree
from megamix.config.optimizers import OptimizerConfig
from megamix.config.pace import Pace
from megamix.config.problems import ConfigError, nearest, override_meant
from megamix.config.sections import (
    ContextConfig,
    ExpertConfig,
    FP8Config,
    ParallelismConfig,
    PipelineConfig,
    PrecisionConfig,
    TensorConfig,
)

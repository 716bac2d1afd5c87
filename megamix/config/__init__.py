"""Configuration: TOML files and overrides in, typed frozen sections out. No torch here: a mistake shows at once."""

from megamix.config.checks import check_world_size, grad_accum_steps
from megamix.config.load import config_from_dict, config_schema, effective_tables, load_config, toml_tables
from megamix.config.mesh_checks import stages_per_rank
from megamix.config.model_and_data import (
    DataConfig,
    DataSource,
    DataStage,
    ModelConfig,
    RopeScaling,
    default_ffn_hidden_size,
    whole_weights,
)  # fmt: skip
from megamix.config.problems import ConfigError
from megamix.config.sections import (
    CheckpointConfig,
    Config,
    LrScheduleConfig,
    MetricsConfig,
    OptimizerConfig,
    OptimizerGroup,
    ParallelismConfig,
    PrecisionConfig,
    ProfilingConfig,
    TrainingConfig,
    loss_scale_rule,
)  # fmt: skip
from megamix.config.toml_text import config_to_toml, section_to_toml

__all__ = [
    "CheckpointConfig",
    "Config",
    "ConfigError",
    "DataConfig",
    "DataSource",
    "DataStage",
    "LrScheduleConfig",
    "MetricsConfig",
    "ModelConfig",
    "OptimizerConfig",
    "OptimizerGroup",
    "ParallelismConfig",
    "PrecisionConfig",
    "ProfilingConfig",
    "RopeScaling",
    "TrainingConfig",
    "check_world_size",
    "config_from_dict",
    "config_schema",
    "config_to_toml",
    "default_ffn_hidden_size",
    "effective_tables",
    "grad_accum_steps",
    "load_config",
    "loss_scale_rule",
    "section_to_toml",
    "stages_per_rank",
    "toml_tables",
    "whole_weights",
]

"""Configuration: TOML files and overrides in, typed frozen sections out. No torch here: a mistake shows at once."""

from megamix.config.checks import check_world_size, grad_accum_steps
from megamix.config.data_section import DataConfig, DataSource, DataStage, whole_weights
from megamix.config.fields import loss_scale_rule
from megamix.config.load import config_from_dict, config_schema, effective_tables, load_config, toml_tables
from megamix.config.mesh_checks import data_parallel_size
from megamix.config.model_section import ModelConfig, RopeScaling, default_ffn_hidden_size
from megamix.config.pipeline_checks import stages_per_rank
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
)
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
    "data_parallel_size",
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

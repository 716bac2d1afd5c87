"""The typed sections of a configuration: one class per TOML table, one documented field per key.

The text under a field is the description that `megamix config --schema` prints. Checks that need more than one
field live in `checks.py`.
"""

import math
from typing import Annotated, Literal, cast

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)


class Section(BaseModel):
    """A frozen table: unknown keys, wrong types, inf and nan are errors; a whole number may stand for a float."""

    model_config = ConfigDict(
        frozen=True, strict=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
    )


def _power_of_two(value: float) -> float:
    # Multiplying by a power of two moves the exponent alone. Any other scale would round every gradient once on the
    # way in and once on the way out, and the unscaled step would no longer equal the plain one. The scale and its
    # inverse must both be normal FP32 numbers, hence the range.
    mantissa, exponent = math.frexp(value)
    if mantissa != 0.5 or not -126 <= exponent - 1 <= 126:
        raise ValueError("must be a power of two from 2**-126 to 2**126")
    return value


def _loss_scale(value: object) -> object:
    # One check in front of the union: pydantic would report a bad value once for every member of the union.
    if isinstance(value, str) and value in ("auto", "dynamic", "off"):
        return value
    try:
        if isinstance(value, int | float) and not isinstance(value, bool):
            return _power_of_two(float(value))
    except (ValueError, OverflowError):
        pass
    raise ValueError('must be "auto", "dynamic", "off" or a power of two from 2**-126 to 2**126')


Text = Annotated[str, Field(min_length=1)]
PowerOfTwo = Annotated[PositiveFloat, AfterValidator(_power_of_two)]
Beta = Annotated[float, Field(ge=0, lt=1)]


class ModelConfig(Section):
    """The decoder-only transformer."""

    vocab_size: Annotated[PositiveInt, Field(examples=[2048])]
    """Rows of the embedding table; at least the number of tokens the tokenizer knows."""
    seq_len: Annotated[PositiveInt, Field(examples=[256])]
    """Tokens in one training sequence."""
    hidden_size: Annotated[PositiveInt, Field(examples=[192])]
    """Width of the residual stream; a multiple of num_heads."""
    num_layers: Annotated[PositiveInt, Field(examples=[4])]
    """Number of transformer blocks."""
    num_heads: Annotated[PositiveInt, Field(examples=[6])]
    """Query heads of each attention."""
    num_kv_heads: PositiveInt | None = None
    """Key and value heads (grouped-query attention); divides num_heads. Not set: num_heads."""
    ffn_hidden_size: PositiveInt | None = None
    """Inner width of the feed-forward part. Not set: 4 * hidden_size for gelu, 8/3 * hidden_size rounded up to a
    multiple of 64 for swiglu."""
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    """Normalisation in front of attention, feed-forward part and head."""
    norm_eps: PositiveFloat = 1e-5
    """Added to the mean square (rmsnorm) or variance (layernorm) before its root."""
    position: Literal["rotary", "learned"] = "rotary"
    """How a token learns its place: rotated queries and keys, or an added table of seq_len rows."""
    rope_theta: PositiveFloat = 10000.0
    """Base of the rotary wavelengths; only with position = "rotary"."""
    activation: Literal["swiglu", "gelu"] = "swiglu"
    """The feed-forward part's nonlinearity."""
    bias: bool = False
    """Whether linear layers and layernorm carry a bias."""
    tie_embeddings: bool = True
    """Whether the head reads the embedding table instead of its own weight."""
    init_std: PositiveFloat = 0.02
    """Standard deviation of the initial weights."""
    compile: bool = False
    """Whether each block runs through torch.compile."""


class DataConfig(Section):
    """Token files; paths are relative to the folder the command is started in."""

    train: Annotated[Text, Field(examples=["runs/data/train"])]
    """Prefix of the training tokens: PREFIX.bin and PREFIX.idx."""
    valid: Text | None = None
    """Prefix of the validation tokens. Not set: no validation."""
    tokenizer: Text | None = None
    """A tokenizer.json, needed for the sample of text at the end of a run. Not set: no sample."""


class OptimizerGroup(Section):
    """Parameters whose names match a pattern, with a learning rate and weight decay of their own."""

    pattern: Annotated[Text, Field(examples=["*.bias"])]
    """Shell-style pattern (fnmatch) on the parameter's full name; the first group that matches wins."""
    lr_factor: NonNegativeFloat = 1.0
    """Multiplies the scheduled learning rate."""
    weight_decay: NonNegativeFloat | None = None
    """Weight decay of the group. Not set: optimizer.weight_decay, and 0 for one-dimensional parameters."""


class OptimizerConfig(Section):
    """The update of the FP32 master weights."""

    name: Literal["adamw", "nag"] = "adamw"
    """adamw, or nag: SGD with Nesterov momentum."""
    lr: Annotated[PositiveFloat, Field(examples=[3e-4])]
    """Peak learning rate."""
    min_lr: NonNegativeFloat = 0.0
    """Where the decay ends; at most lr."""
    betas: Annotated[tuple[Beta, Beta], Field(strict=False)] = (0.9, 0.95)
    """AdamW's decay rates of the first and second moment, each in [0, 1)."""
    eps: PositiveFloat = 1e-8
    """AdamW's addend to the root of the second moment."""
    momentum: Annotated[float, Field(gt=0, lt=1)] = 0.9
    """NAG's momentum, between 0 and 1."""
    weight_decay: NonNegativeFloat = 0.1
    """Weight decay of parameters with two or more dimensions."""
    clip_grad: NonNegativeFloat = 1.0
    """Largest global gradient norm; a longer gradient is scaled down to it. 0: no clipping."""
    groups: Annotated[
        tuple[OptimizerGroup, ...], Field(strict=False, examples=[[{"pattern": "*.bias", "weight_decay": 0.0}]])
    ] = ()
    """Exceptions by parameter name, the first match wins. Empty: all alike, but no decay on 1-d parameters."""
    compile: bool = True
    """Whether the update is fused by torch.compile; without a working compiler, or with false, torch's own fused
    kernels are used."""


class LrScheduleConfig(Section):
    """The learning rate as a function of applied updates (a skipped step does not count)."""

    decay_style: Literal["cosine", "linear", "wsd", "inverse_sqrt", "constant"] = "cosine"
    """Shape of the way from lr to min_lr after the warm-up; wsd (warm-up, stable, decay) holds lr until its final
    decay."""
    warmup_steps: NonNegativeInt = 0
    """Updates of linear growth up to lr."""
    decay_steps: PositiveInt | None = None
    """Updates of the decay, counted from the end of the warm-up; for wsd the last decay_steps of the run, and
    required. Not set: all updates after the warm-up."""


class PrecisionConfig(Section):
    """Number formats and the loss scale. The loss scale's settings are powers of two."""

    dtype: Literal["fp16", "bf16", "fp32"] = "bf16"
    """Format of parameters, activations and gradients; master weights and optimizer state are always FP32."""
    grad_dtype: Literal["half", "fp32"] = "half"
    """Format in which a step's gradients are added up: half is dtype's own, fp32 costs two more bytes a parameter."""
    reduce_dtype: Literal["half", "half_fp32_sum", "fp32"] | None = None
    """How gradients travel to the rank that owns their sum, and what it keeps: half and half, half and FP32, FP32 and
    FP32. Not set: half, or fp32 where grad_dtype is fp32."""
    loss_scale: Annotated[Literal["auto", "dynamic", "off"] | float, BeforeValidator(_loss_scale)] = "auto"
    """auto (dynamic for fp16, off otherwise), dynamic, off, or a number: a fixed scale."""
    init_scale: PowerOfTwo = 2.0**24
    """The dynamic scale's first value."""
    growth_factor: Annotated[PowerOfTwo, Field(gt=1)] = 2.0
    """Multiplies the scale after growth_interval clean steps."""
    backoff_factor: Annotated[PowerOfTwo, Field(lt=1)] = 0.5
    """Multiplies the scale after an overflow."""
    growth_interval: PositiveInt = 2000
    """Clean steps in a row before the scale grows."""
    hysteresis: PositiveInt = 1
    """Overflows in a row before a scale that has survived a step backs off; an untried scale backs off at once."""
    min_scale: PowerOfTwo = 1.0
    """The scale never falls below."""
    max_scale: PowerOfTwo = 2.0**32
    """The scale never grows beyond."""


class TrainingConfig(Section):
    """Length and batches of the run."""

    steps: Annotated[PositiveInt, Field(examples=[1000])]
    """Number of steps, each over one global batch."""
    micro_batch_size: Annotated[PositiveInt, Field(examples=[8])]
    """Sequences in one forward and backward of one rank."""
    global_batch_size: Annotated[PositiveInt, Field(examples=[16])]
    """Sequences in one step over all ranks; a multiple of micro_batch_size * dp_size, the rest is accumulation."""
    seed: NonNegativeInt = 1234
    """Seed of the initial weights and of the data order."""
    eval_interval: NonNegativeInt = 0
    """Steps between validations. 0: only at the end."""
    eval_batches: PositiveInt = 8
    """Global batches of one validation."""


class ParallelismConfig(Section):
    """How the ranks share the work."""

    dp_size: PositiveInt | None = None
    """Data-parallel ranks. Not set: all ranks."""
    bucket_size: PositiveInt | None = None
    """Elements of a bucket, the unit of communication. Not set: chosen from the number of parameters and ranks."""
    overlap: bool = True
    """Whether communication runs beside backward and forward; the result is the same either way."""


class CheckpointConfig(Section):
    """What a run leaves behind."""

    folder: Annotated[Text, Field(examples=["runs/my-run"])]
    """Folder of the run: metrics, event file, effective configuration, weights, sample."""


class MetricsConfig(Section):
    """What a run reports."""

    log_interval: PositiveInt = 10
    """Steps between console lines."""
    tensorboard: bool = True
    """Whether a TensorBoard event file is written."""


class ProfilingConfig(Section):
    """A torch profiler trace of chosen steps."""

    start_step: NonNegativeInt = 0
    """First step in the trace."""
    num_steps: NonNegativeInt = 0
    """Steps in the trace. 0: no trace."""


class Config(Section):
    """A whole run."""

    model: ModelConfig
    data: DataConfig
    optimizer: OptimizerConfig
    lr_schedule: LrScheduleConfig
    precision: PrecisionConfig
    training: TrainingConfig
    parallelism: ParallelismConfig
    checkpoint: CheckpointConfig
    metrics: MetricsConfig
    profiling: ProfilingConfig


SECTIONS = {name: cast(type[Section], field.annotation) for name, field in Config.model_fields.items()}

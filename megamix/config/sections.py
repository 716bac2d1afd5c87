"""The typed sections of a configuration: one class per TOML table, one documented field per key.

The text under a field is the description that `megamix config --schema` prints. Checks that need more than one
field live in `checks.py`.
"""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from megamix.base.axes import AXES
from megamix.config.choices import ChosenTable, ExtendedTable, left_out
from megamix.config.loss_scales import LOSS_SCALE, LossScaleConfig
from megamix.config.model_and_data import FAMILY, SCALING, DataConfig, ModelConfig, Text
from megamix.config.optimizers import OPTIMIZER, OptimizerConfig
from megamix.config.pace import with_steps
from megamix.plugins import MORE_AXES, TRACKERS, Section
from megamix.settings.average import AverageSettings


class LrScheduleConfig(Section):
    """The learning rate as a function of applied updates."""

    decay_style: Literal["cosine", "linear", "wsd", "inverse_sqrt", "constant"] = "cosine"
    """Way from lr to min_lr after the warm-up; wsd (warm-up, stable, decay) holds lr until its final decay."""
    warmup_steps: NonNegativeInt = 0
    """Updates of linear growth up to lr."""
    decay_steps: PositiveInt | None = None
    """Updates of the decay, from the end of the warm-up. wsd needs it, and counts the run's last ones. Not set: all
    after the warm-up."""
    warmup_tokens: NonNegativeInt = 0
    """In place of warmup_steps, for a run as long as training.tokens: the rate then follows the tokens of applied
    updates."""
    decay_tokens: PositiveInt | None = None
    """In place of decay_steps, for such a run."""


class FP8Config(Section):
    """Products in FP8. Embedding, head, router and experts stay half."""

    recipe: Annotated[Literal["rowwise", "tensorwise"], Field(examples=["rowwise"])]
    """What of an operand has one scale: a row, which keeps small rows and needs dtype "bf16", or all. A GPU must be at
    least SM 8.9."""
    grad: Literal["e5m2", "e4m3"] = "e5m2"
    """Format of gradients in products: e5m2 has FP16's range, e4m3 one digit more."""
    weight_grad: Literal["half", "fp8"] = "half"
    """Format of the products that make gradients of weights."""
    but: Annotated[tuple[Text, ...], Field(strict=False, examples=[["blocks.0.*", "*.feed_forward.down"]])] = ()
    """Patterns of the blocks' linear layers whose products stay half."""


class PrecisionConfig(Section):
    """Number formats, and what follows an overflow."""

    dtype: Literal["fp16", "bf16", "fp32"] = "bf16"
    """Format of parameters, activations and gradients; master weights are always FP32."""
    grad_dtype: Literal["half", "fp32"] = "half"
    """Format in which a step's gradients are added up: dtype's own, or FP32, for two more bytes a parameter."""
    reduce_dtype: Literal["half", "half_fp32_sum", "fp32"] | None = None
    """Format in which gradients travel to their sum's owner, and of the sum: both half, half and FP32, or both FP32.
    Not set: half, or fp32 if grad_dtype is fp32."""
    loss_scale: Annotated[LossScaleConfig, LOSS_SCALE] = left_out()
    """The factor on the loss."""
    fp8: Annotated[FP8Config | None, Field(examples=[{"recipe": "rowwise"}])] = None
    """Products in FP8. Not set: all products are of dtype."""
    on_overflow: Literal["requeue", "redo", "skip"] = "requeue"
    """A batch that overflowed is tried again two attempts later, or at once, with one wait for the device a step, or
    lost."""
    max_retries: NonNegativeInt = 3
    """Retries of a batch at scales that had worked. Then it is set aside and named in set_aside.jsonl."""
    max_overflows_in_a_row: PositiveInt = 50
    """Overflows in a row after which the run gives up; the search down from max_scale needs 33."""
    max_overflows_at_floor: PositiveInt = 20
    """Overflows in a row at min_scale, or at a scale that never falls, after which the run gives up."""
    max_overflows_per_window: PositiveInt = 250
    """Overflows within 1000 attempts after which the run gives up."""


_BatchFrom = Annotated[tuple[NonNegativeInt, PositiveInt], Field(strict=False)]


def _check_ramp(ramp: tuple[_BatchFrom, ...]) -> tuple[_BatchFrom, ...]:
    firsts = [first for first, _ in ramp]
    if firsts != sorted(set(firsts)) or firsts[:1] not in ([], [0]):
        raise ValueError("must have update 0 in its first pair, and in each other one a later update than before")
    return ramp


class AverageConfig(Section, AverageSettings):  # type: ignore[misc]  # as frozen as its settings, by pydantic
    """An exponential moving average (EMA) of the FP32 masters, from those of the first update that has it, over some
    1/(1-decay) updates. Each validation computes its loss, too; training stays the same."""


class TrainingConfig(Section):
    """Length and batches of the run."""

    steps: Annotated[PositiveInt, Field(examples=[1000])]
    """Applied updates, each over one global batch; attempts that overflow do not count. Neither required nor read
    if tokens is set."""
    tokens: Annotated[NonNegativeInt, Field(examples=[20_000_000_000])] = 0
    """In place of steps: tokens that the run's updates must reach. 0: none."""
    micro_batch_size: Annotated[PositiveInt, Field(examples=[8])]
    """Sequences in a forward and backward of one rank."""
    global_batch_size: Annotated[PositiveInt, Field(examples=[16])]
    """Sequences in a step over all ranks; a multiple of micro_batch_size*dp_size*replicas. The factor is gradient
    accumulation, which has no key."""
    batch_ramp: Annotated[
        tuple[_BatchFrom, ...], AfterValidator(_check_ramp), Field(strict=False, examples=[[[0, 256], [2000, 512]]])
    ] = ()
    """Pairs of a number of updates and the size of global batches from there on; the last size is global_batch_size.
    Empty: all have it."""
    seed: Annotated[NonNegativeInt, Field(lt=2**63)] = 1234
    """Seed of the initial weights and of the data order."""
    deterministic: bool = False
    """Whether a run on GPUs repeats bit for bit, as one on CPUs always does; slower."""
    eval_interval: NonNegativeInt = 0
    """Steps between validations. 0: only at the end."""
    eval_batches: PositiveInt = 8
    """Global batches of one validation."""
    average: Annotated[AverageConfig | None, Field(examples=[{"decay": 0.999}])] = None
    """Average of the weights. Not set: none."""


def _divides(size: int) -> int:
    if size == 1:
        raise ValueError("must be 2 or more (for one rank: false in place of the table)")
    return size


_Ranks = Annotated[PositiveInt, AfterValidator(_divides), Field(examples=[2])]


class PipelineConfig(Section):
    """Pipeline-parallel ranks, each with some layers."""

    size: _Ranks
    """Number of ranks."""
    schedule: Literal["1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv_zero_bubble"] = "1f1b"
    """Order of a step's forwards and backwards. Zero-bubble schedules compute gradients of weights separately, while a
    rank would wait."""
    stages_per_rank: PositiveInt | None = None
    """Stages (runs of neighbouring layers) on each rank. Not set: 1 for 1f1b, else 2."""


class ContextConfig(Section):
    """Context-parallel ranks, which divide the positions of each sequence."""

    size: _Ranks
    """Number of ranks. 2*size must divide seq_len; 8*size if documents are packed; size if method is "heads"."""
    method: Literal["gather", "heads"] = "gather"
    """Each rank gathers keys and values of all positions for its queries, or exchanges its positions for all positions
    of some heads; then size*tensor.size must divide num_kv_heads."""


class ExpertConfig(Section):
    """Expert-parallel ranks: neighbours among the data-parallel and context-parallel ranks, which divide the experts
    and take no ranks of their own.
    """

    size: _Ranks
    """Number of ranks. Must divide num_experts."""
    method: Literal["exchange", "gather"] = "exchange"
    """Each token goes to its experts' ranks, while the host waits for their numbers once a layer and micro-batch; or
    all tokens go to all ranks, without a wait, in BF16 with size at most model.experts.top_k."""


class TensorConfig(Section):
    """Tensor-parallel ranks: neighbours that divide each layer."""

    size: _Ranks
    """Number of ranks. Must divide heads, ffn_hidden_size and vocab_size."""
    sequence_parallel: bool = True
    """Whether the ranks also divide the positions between layers: same traffic, less memory. size must divide seq_len.
    """


class ParallelismConfig(Section):
    """Divides the work among the ranks."""

    dp_size: PositiveInt | None = None
    """Data-parallel ranks that share out the masters. Not set: all ranks / the product of the other sizes."""
    replicas: PositiveInt = 1
    """Groups of data-parallel ranks (hybrid sharding), each with all masters, which its ranks share out."""
    context: Annotated[ContextConfig | None, Field(examples=[{"size": 2}])] = None
    """Context parallelism. Not set: each rank has whole sequences."""
    expert: Annotated[ExpertConfig | None, Field(examples=[{"size": 2}])] = None
    """Expert parallelism. Not set: each rank has all experts."""
    tensor: Annotated[TensorConfig | None, Field(examples=[{"size": 2}])] = None
    """Tensor parallelism. Not set: each rank has whole layers."""
    pipeline: Annotated[PipelineConfig | None, Field(examples=[{"size": 2}])] = None
    """Pipeline parallelism. Not set: each rank has all layers."""
    shard: Literal["states", "gradients", "parameters"] = "states"
    """What data-parallel ranks share out: masters and optimizer states, gradients too, half parameters too (ZeRO 1, 2,
    3). All train the same bits. "parameters" gathers block by block, small ones several at a time."""
    accumulate: Literal["local", "owner"] = "local"
    """Who adds up a step's micro-batches: each rank its own, to be reduced once, or the owners, in FP32. Then each
    micro-batch is sent, no rank keeps gradients in between, and sums round otherwise."""
    bucket_size: PositiveInt | None = None
    """Elements of a bucket, the unit of communication. Not set: chosen by parameters and ranks."""
    overlap: bool = True
    """Whether communication runs beside backward and forward; the bits are the same."""
    timeout_s: PositiveFloat = 600.0
    """Seconds without progress of a rank, computing or waiting, after which all end."""

    @property
    def sequence_parallel_ranks(self) -> int:
        """Return the tensor-parallel ranks that divide the positions between layers, too; 1: each holds them all."""
        return self.tensor.size if self.tensor is not None and self.tensor.sequence_parallel else 1


MORE_AXES.reserved = (*ParallelismConfig.model_fields, *AXES, "ep")


class CopyConfig(Section):
    """A further folder, best on another file system, to which a thread copies each checkpoint."""

    folder: Annotated[Text, Field(examples=["/mnt/copies/my-run"])]
    """The folder, of one run."""
    keep: NonNegativeInt = 0
    """Newest copies to keep, beside those of keep_every. 0: all."""


class CheckpointConfig(Section):
    """Says when a run saves, and how it continues."""

    folder: Annotated[Text, Field(examples=["runs/my-run"])]
    """Folder of all that the run writes."""
    save_interval: NonNegativeInt = 500
    """Steps between checkpoints. 0: only at the end."""
    keep: Annotated[PositiveInt, Field(ge=2)] = 2
    """Newest checkpoints to keep; at least 2, as the newest may prove damaged."""
    keep_every: NonNegativeInt = 0
    """Steps between checkpoints that are saved and stay. 0: none."""
    copies: Annotated[CopyConfig | None, Field(examples=[{"folder": "/mnt/copies/my-run"}])] = None
    """Copies of the checkpoints. Not set: none."""
    copy_command: Annotated[tuple[Text, ...], Field(strict=False, examples=[["my_upload", "{path}", "{name}"]])] = ()
    """Program and arguments that take a checkpoint elsewhere, as to an object store: {path} is its folder, {name} its
    name."""
    async_save: bool = True
    """Whether training goes on while a checkpoint is written, from a copy on the host."""
    mirror: NonNegativeInt = 0
    """Steps between copies of the state to the nodes' shared memory, from which a restart goes on. 0: none."""
    on_save_failure: Literal["continue", "stop"] = "continue"
    """After a failed save: a line in the log, or the end of the run, as after its last save either way."""
    resume: Text = "auto"
    """auto continues from the newest whole checkpoint in folder; never refuses a folder that holds a run; the path of a
    checkpoint begins a new run from there."""
    begin_anew: Annotated[tuple[Text, ...], Field(strict=False, examples=[["head.weight"]])] = ()
    """Patterns (fnmatch) of parameters that a run from another one's checkpoint does not keep; then any key of [model]
    may have changed."""
    max_restarts: NonNegativeInt = 3
    """Restarts in a row without progress; the next one gives up."""
    replica_check_interval: NonNegativeInt = 100
    """Steps between comparisons of half parameters with the masters on all ranks; a difference ends the run. 0: never.
    """


class MetricsConfig(Section):
    """Says when a run reports, and where."""

    log_interval: PositiveInt = 10
    """Steps between console lines."""
    sample_prompt: str = ""
    """Text with which the sample at a run's end begins."""
    tensorboard: bool = True
    """Whether a TensorBoard event file is written."""
    precision_interval: NonNegativeInt = 100
    """Steps between reports of each layer's use of FP16's range. 0: none."""


class WandbConfig(Section):
    """Weights & Biases, offline: it writes into the run's folder, and wandb sync sends it."""

    project: Text = "megamix"
    """Project that the run is part of."""


class PrometheusConfig(Section):
    """A file for the textfile collector of Prometheus' node exporter, replaced with each row."""

    file: Annotated[Text, Field(pattern=r"\.prom$", examples=["/var/lib/node_exporter/my-run.prom"])]
    """Path, of this run alone, that ends in .prom."""


class AlertConfig(Section):
    """A program that is told how a run ends, and of many overflows in a row."""

    command: Annotated[tuple[Text, ...], Field(strict=False, min_length=1, examples=[["my_pager", "--urgent"]])]
    """Program and arguments. It gets one JSON object on stdin, and has 10 s."""


TRACKERS.sections |= {"wandb": WandbConfig, "prometheus": PrometheusConfig, "alert": AlertConfig}
TRACKERS.reserved = MetricsConfig.model_fields


class ProfilingConfig(Section):
    """A trace of chosen steps by torch's profiler, and when their buckets were sent and waited for."""

    start_step: NonNegativeInt = 0
    """First step in the trace."""
    num_steps: NonNegativeInt = 0
    """Steps in the trace. 0: no trace."""


class Tables(Section):
    """All tables of a run."""

    plugins: Annotated[tuple[Text, ...], Field(strict=False, examples=[["my_module"]])] = ()
    """Modules, installed or in the working folder, that register names for the tables below."""
    model: Annotated[ModelConfig, FAMILY] = left_out()
    data: DataConfig = left_out()
    optimizer: Annotated[OptimizerConfig, OPTIMIZER] = left_out()
    lr_schedule: LrScheduleConfig = left_out()
    precision: PrecisionConfig = left_out()
    training: TrainingConfig = left_out()
    parallelism: Annotated[ParallelismConfig, ExtendedTable(MORE_AXES, ParallelismConfig)] = left_out()
    checkpoint: CheckpointConfig = left_out()
    metrics: Annotated[MetricsConfig, ExtendedTable(TRACKERS, MetricsConfig)] = left_out()
    profiling: ProfilingConfig = left_out()

    @model_validator(mode="before")
    @classmethod
    def _filled(cls, tables: Any) -> Any:
        return with_steps(tables)


SECTIONS = [name for name, field in Tables.model_fields.items() if field.default == {}]
# The tables that choose, by their paths; auto of the loss scale by the dtype, too.
CHOSEN: dict[tuple[str, ...], ChosenTable] = {
    ("model",): FAMILY,
    ("model", "rope", "scaling"): SCALING,
    ("optimizer",): OPTIMIZER,
    ("precision", "loss_scale"): LOSS_SCALE,
}
CHOOSING = frozenset(table.key for table in CHOSEN.values())

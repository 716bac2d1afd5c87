"""The model of a job on this rank, the initial weights that one process would draw, and what runs its micro-batches."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megamix.comm.collectives import Collectives, make_collectives
from megamix.comm.topology import Axis, Topology
from megamix.config import ConfigError, DecoderConfig, FP8Config, ParallelismConfig, axis_table, first_weights
from megamix.mixed_precision.engine import ShardedEngine
from megamix.mixed_precision.flat_layout import ParamSpec
from megamix.mixed_precision.settings import Placement
from megamix.mixed_precision.weights import Fill, without_values
from megamix.model.decoder import EMBEDDING_WEIGHT, Decoder
from megamix.model.family import family_of, flops_per_token
from megamix.model.fp8 import FP8_CAPABILITY, in_words, use_fp8
from megamix.model.language_model import LanguageModel
from megamix.parallel.borders import Border
from megamix.parallel.context_parallel import divide_positions
from megamix.parallel.expert_parallel import divide_experts
from megamix.parallel.micro_batch_runner import MicroBatchRunner
from megamix.parallel.stages import StagePlan, describe_stages, keep_layers, plan_pipeline
from megamix.parallel.tensor_parallel import divide_layers, place_params, take_blocks
from megamix.plugins import MORE_AXES


class ModelPart:
    """This rank's part of a job's model. It knows the sections that made it, so nobody asks the configuration again."""

    def __init__(
        self, section: DecoderConfig, parallelism: ParallelismConfig, fp8: FP8Config | None, topology: Topology,
        device: torch.device,
    ):  # fmt: skip
        """Build the part, with weights that have no values yet. Every rank must call it. Raises: as `build_model`."""
        self.section, self._parallelism, self._fp8 = section, parallelism, fp8
        self.stages = plan_pipeline(section, parallelism)  # all stages of the pipeline; none without one
        self.module, self.placements = build_model(section, parallelism, topology, device, self.stages, fp8=fp8)

    @property
    def flops_per_token(self) -> int:
        """Return the operations of the whole model for a token; see `megamix.model.family`."""
        return flops_per_token(self.section)

    @property
    def begins_with(self) -> str:
        """Return the line of the log on the first weights; empty for drawn ones."""
        weights = first_weights(self.section)
        return f"begins with {weights}" if weights else ""

    @property
    def lines(self) -> list[str]:
        """Return the lines of the log on products in FP8 and on the stages."""
        on_cpu = next(self.module.parameters()).device.type == "cpu"
        pipeline = self._parallelism.pipeline
        stages = f"pipeline, {pipeline.schedule} | {describe_stages(self.stages)}" if pipeline else ""
        return [in_words(self.module, self._fp8, on_cpu=on_cpu) if self._fp8 else "", stages]

    def first_weights(self, seed: int, *, packed: bool, only: Collection[str] | None = None) -> Fill:
        """Return what writes the first weights, which may hold those of the whole model. `only`: see `drawn`.
        Raises: as `drawn`.
        """
        return drawn(self.module, seed, packed=packed, only=only)

    def runner(self, engine: ShardedEngine, micro_batch_size: int) -> MicroBatchRunner:
        """Return the object that sends a step's micro-batches through this part."""
        pipeline = self._parallelism.pipeline
        if pipeline is None:
            return MicroBatchRunner(engine)
        # torch's pipelines import the compiler, which takes 2 s. Jobs without a pipeline do not wait for that.
        from megamix.parallel.pipeline_parallel import Pipeline

        parts = self._parallelism.sequence_parallel_ranks  # in training
        return Pipeline(engine, _ours(self.module), self.stages, pipeline.schedule, micro_batch_size, parts)

    def whole(self) -> LanguageModel:
        """Return the whole model, with other weights."""
        return family_of(self.section)(self.section)


def build_model(
    config: DecoderConfig, parallelism: ParallelismConfig, topology: Topology, device: torch.device,
    stages: Sequence[StagePlan] = (), *, fp8: FP8Config | None = None,
) -> tuple[LanguageModel, dict[str, Placement]]:  # fmt: skip
    """Build this rank's part of the model, with weights that have no values yet. Return this part, and by name the
    placement of each parameter in the whole model. Every rank must call it. `stages`: all stages of the pipeline, if
    there is one. Raises: ConfigError if the device has no products in FP8.
    """
    model, placements = outline(config, parallelism, topology, stages)
    if fp8 is not None:
        _use_fp8(model, fp8, device)
    divide_work(model, parallelism, topology, lambda axis: make_collectives(axis, device))
    without_values(model, device)
    model.place_buffers(device)
    return model, placements


def _use_fp8(model: LanguageModel, section: FP8Config, device: torch.device) -> None:
    if (
        use_fp8(model, section)
        and device.type == "cuda"
        and (found := torch.cuda.get_device_capability(device)) < FP8_CAPABILITY
    ):
        raise ConfigError(
            [
                f'precision.fp8.recipe: got "{section.recipe}", and {torch.cuda.get_device_name(device)} is SM '
                f"{found[0]}.{found[1]}, but products in FP8 need SM 8.9; write precision.fp8 = false"
            ],
            "job",
        )


def divide_work(
    model: LanguageModel, parallelism: ParallelismConfig, topology: Topology, connect: Callable[[Axis], Collectives]
) -> None:
    """Make a model whose parameters are this rank's blocks compute this rank's part of the work. From then on all ranks
    must call the model together. `connect`: returns the collectives of an axis.
    """
    for name, divide in _OWN_AXES.items():
        if (axis := topology.along(name)).size > 1:
            divide(_ours(model), connect(axis), getattr(parallelism, axis_table(name)))
    for name, divide in MORE_AXES.registered.items():
        if (axis := topology.along(name)).size > 1:
            divide(model, connect(axis), **{key: value for key, value in getattr(parallelism, name) if key != "size"})


# The functions that divide the work along our own axes. A plugin registers one for its own axis.
_OWN_AXES: dict[str, Callable[[Decoder, Collectives, Any], None]] = {
    "cp": lambda model, ranks, keys: divide_positions(model, ranks, by_heads=keys.method == "heads"),
    "tp": lambda model, ranks, keys: divide_layers(model, Border(ranks, sequence=keys.sequence_parallel)),
    "ep": lambda model, ranks, keys: divide_experts(model, ranks, gathers=keys.method == "gather"),
}


def _ours(model: LanguageModel) -> Decoder:
    """Return a model of our own layers. Raises: TypeError for another one, whose modules ranks cannot divide."""
    if not isinstance(model, Decoder):
        raise TypeError(f"a {type(model).__name__} is not divided over ranks: take one rank along tp, pp and cp")
    return model


def outline(
    config: DecoderConfig, parallelism: ParallelismConfig, topology: Topology, stages: Sequence[StagePlan] = ()
) -> tuple[LanguageModel, dict[str, Placement]]:
    """Build a rank's part of the model on the meta device, without memory and without divided operations. Return this
    part and the placements. `topology`: that of any rank, connected or not.
    """
    layers = sorted(layer for plan in stages if plan.rank == topology.pp.rank for layer in plan.layers)
    with torch.device("meta"):
        model = family_of(config).part(config, layers or range(config.num_layers))
    placements = place_params(model, topology, sequence_parallel=parallelism.sequence_parallel_ranks > 1)
    if stages:
        keep_layers(_ours(model), layers)
        if config.tie_embeddings and stages[0].rank != stages[-1].rank:
            placements[EMBEDDING_WEIGHT] = replace(placements[EMBEDDING_WEIGHT], owners=topology.ends)
    take_blocks(model, topology)
    return model, placements


def drawn(model: LanguageModel, seed: int, *, packed: bool = False, only: Collection[str] | None = None) -> Fill:
    """Return the function that writes the first weights. Each owner writes its own share; the values are the same on
    any mesh. `packed`: see `LanguageModel.draws`. `only`: the parameters to write, for an engine that loads the others
    from a checkpoint; None: all. Raises: ConfigError saying why files hold no such weights.
    """
    if only is not None and not only and not packed:
        return lambda spec, start, values: None
    try:
        draw = model.draws(seed, packed=packed)
    except ValueError as error:  # wrong input, which the command tells in a line
        raise ConfigError([str(error)], "job") from error

    def fill(spec: ParamSpec, start: int, values: Tensor) -> None:
        if only is None or spec.name in only:
            draw(values, name=spec.name, full_shape=spec.full_shape, block=spec.block, first=start)

    return fill

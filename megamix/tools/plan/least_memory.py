"""Fewest bytes that a GPU of a layout needs: arithmetic that lies below the traced plan. No torch is imported."""

from __future__ import annotations

from math import ceil, prod

from megamix.config import Config, FirstLayers, ModelConfig, PipelineConfig, axis_sizes, ranks_along, stages_per_rank
from megamix.model import sizes
from megamix.train.least_memory import LeastHeld

HALF, FP32 = 2, 4


class LeastMemory:
    """A lower bound of the peak of the GPU that needs the most, by what backward recomputes.

    Counted are parameters, gradients that stay, masters, states, what blocks keep, what arrives in a pipeline, and the
    head's gradient in FP32. Left out are padding, most temporary memory, and what a pipeline's last ranks hold.
    """

    def __init__(self, config: Config, dp_size: int):
        ranks, training = config.parallelism, config.training
        self._model, self._ranks = config.model, ranks
        self._half = FP32 if config.precision.dtype == "fp32" else HALF
        self._count = training.global_batch_size // (training.micro_batch_size * dp_size * ranks.replicas)
        self._tp, self._pp = ranks_along(ranks, "tp"), ranks.pipeline
        self._tokens = training.micro_batch_size * config.model.seq_len / ranks_along(ranks, "cp")
        self._kept_half = self._half / (1 if config.precision.fp8 is None else 2)
        averages = training.average is not None
        least = LeastHeld(config.model, config.optimizer, config.precision, ranks, averages=averages)
        grads_stay = self._count > 1 and ranks.accumulate == "local"
        world_size = dp_size * prod(axis_sizes(ranks).values())
        self._held = sum(least.by_category(world_size, grads_stay=grads_stay).values())

    def peak(self) -> int:
        """Return the bytes with the configured `recompute`."""
        return self.of(self._model.recompute)

    def of(self, recompute: str | FirstLayers) -> int:
        """Return the bytes with that `recompute`; in a pipeline some first layers count as all.

        Without a pipeline they are those at the end of forward, or while backward computes the last block.
        """
        model, ranks = self._model, self._ranks
        others = ("full" if self._pp else "none") if isinstance(recompute, FirstLayers) else recompute
        if self._pp is not None:
            return int(self._held + self._in_pipeline(self._pp, self._kept(others)))
        full = sizes.num_repeated(model.model_copy(update={"recompute": recompute}))
        table = model.vocab_size * model.hidden_size / self._tp
        beside = FP32 * table + (self._half * table if ranks.shard == "parameters" else 0)
        if full == model.num_layers:
            beside = max(beside, self._kept("selective") - self._kept("full"))
        kept = full * self._kept("full") + (model.num_layers - full) * self._kept(others)
        return int(self._held + kept + beside)

    def fewest_first(self, limit: int) -> int | None:
        """Return how many first layers must be computed again to keep to `limit` bytes; None if all are too few."""
        if self.of("full") > limit:
            return None
        saved = self._kept("none") - self._kept("full")
        return min(self._model.num_layers, max(1, ceil((self.of("none") - limit) / saved)))

    def _in_pipeline(self, pipeline: PipelineConfig, kept: float) -> float:
        """Return the bytes of the first rank's activations and buffers. `kept`: of a layer."""
        on_rank = stages_per_rank(pipeline)
        stages = pipeline.size * on_rank
        # The last stage has the head, so the others have more layers, all about equally many.
        in_stage = (self._model.num_layers - ceil(self._model.num_layers / stages)) // (stages - 1)
        in_stage = max(1, in_stage - (self._model.experts is not None))
        at_once = min(pipeline.size, self._count)
        under_way = at_once * on_rank
        if pipeline.schedule == "interleaved_1f1b":
            under_way = (on_rank - 1) * at_once + 2 * pipeline.size - 1
        elif pipeline.schedule.endswith("zero_bubble"):
            under_way //= 2
        layers = in_stage * max(1, min(under_way, self._count * on_rank))
        # Hidden states that arrive at each end of the rank's stages, of all micro-batches of a step.
        ends = 2 if pipeline.schedule == "zbv_zero_bubble" else 2 * on_rank - 1
        hidden = ends * self._tokens * self._half * self._model.hidden_size
        return layers * kept + self._count * hidden / self._ranks.sequence_parallel_ranks

    def _kept(self, recompute: str) -> float:
        """Return the bytes that a layer keeps for backward, of one micro-batch."""
        model, tp = self._model, self._tp
        width = model.hidden_size
        if recompute == "full":
            return self._tokens * self._half * width / tp
        # Inputs of products are gathered and kept whole, where ranks divide the layers.
        normed = 2 * width if tp > 1 or recompute == "none" else 0
        head = 0 if model.latent_attention else sizes.head_dim(model)
        attention = 2 * head * (model.num_heads + sizes.num_kv_heads(model))
        middle = _least_inner(model) * (sizes.is_gated(model.activation) + 1 + (recompute == "none"))
        return self._tokens * self._kept_half * ((2 * width + attention + middle) / tp + normed)


def _least_inner(model: ModelConfig) -> int:
    """Return the inner width that each token passes in every layer, at least."""
    if (experts := model.experts) is None:
        return sizes.ffn_hidden_size(model)
    inner = experts.top_k * experts.ffn_hidden_size + (experts.shared_ffn_hidden_size or 0)
    return min(inner, sizes.ffn_hidden_size(model)) if experts.dense_layers else inner

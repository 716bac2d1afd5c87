"""Time of a step from its parts: pure arithmetic over a job's work, a machine's rates and a few constants."""

from __future__ import annotations

from math import ceil, inf, log2
from typing import NamedTuple

from megamix.model import sizes
from megamix.tools.plan.time_constants import TimeConstants
from megamix.tools.plan.time_hardware import Hardware
from megamix.tools.plan.time_work import TimedJob

TILE_ROWS, TILE_COLUMNS = 128, 256  # of a product, on one multiprocessor
# Sequence at which a causal kernel has half its rate, about as in published curves of FlashAttention-2 on H100.
HALF_RATE_SEQ = 600
NEWTON_SCHULZ_STEPS = 5
# Best published rates of one product on H100: 1,403 TFLOP/s of FP8's peak, 795 of BF16's. An operand is read twice, for
# its scale and its cast, and written once.
FP8_REACH = (1403 / 1979) / (795 / 989)
FP8_CAST_BYTES = 5
SHORT_HOP_S = 1e-6  # between two GPUs of a node
WIDE_CAST_BYTES = 6  # of each element of a product that a CPU computes in FP32 on halves
# The host's own time in an engine, measured on two cores (docs/benchmarks.md): a parameter of a step and of a further
# micro-batch, a gather of a unit. A layer's launches are an estimate: no host of a GPU was measured.
HOST_TENSOR_S, HOST_AGAIN_S, HOST_GATHER_S, HOST_LAYER_S = 20e-6, 8e-6, 2.4e-4, 5e-4
LAYER_TENSORS = 9


class BetweenProducts(NamedTuple):
    """Bytes that operations between products read and write, an element; forward, then backward."""

    norm: tuple[float, float]
    residual: tuple[float, float]
    activation: tuple[float, float]
    gate: tuple[float, float]
    rotation: tuple[float, float]
    addition: float  # of gradients of one input from several products, each
    logit: float  # forward and backward together
    attended: tuple[float, float]  # of queries, for casts around attention


BETWEEN = {
    "compiled": BetweenProducts((8, 8), (0, 0), (4, 6), (6, 10), (4, 4), 0, 16, (0, 0)),
    "fused": BetweenProducts((4, 6), (6, 6), (4, 6), (10, 18), (8, 8), 6, 24, (0, 0)),
    "eager": BetweenProducts((36, 54), (6, 6), (4, 6), (10, 18), (20, 20), 6, 28, (0, 0)),
    # A CPU computes halves in FP32, with torch's many operations.
    "wide": BetweenProducts((40, 86), (6, 6), (20, 28), (38, 80), (32, 32), 6, 32, (24, 48)),
}


class StepTime(NamedTuple):
    """Seconds of a step.

    parts: products, attention, between (operations between products), recompute; tp, dp, cp, ep (communication that
    computing does not hide); bubble (a pipeline rank's wait for the others, and its transfers); update; host (the
    device's wait for it); fixed.
    """

    parts: dict[str, float]

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    def tokens_per_s(self, job: TimedJob) -> float:
        """Return the tokens that one device computes in a second."""
        return job.step_tokens / self.seconds / job.gpus

    def mfu(self, job: TimedJob, hardware: Hardware) -> float:
        """Return the share of the dense peak that the model's own operations take."""
        from megamix.model.family import flops_per_token  # imports torch

        return self.tokens_per_s(job) * flops_per_token(job.model) / hardware.dense_flops


class Passes(NamedTuple):
    """Seconds of a forward, of the gradients of inputs, and of the gradients of weights."""

    forward: float
    inputs: float
    weights: float

    def times(self, factor: float) -> Passes:
        return Passes(*(factor * seconds for seconds in self))


def step_time(job: TimedJob, hardware: Hardware, constants: TimeConstants) -> StepTime:
    return _Step(job, hardware, constants).time()


class _Step:
    def __init__(self, job: TimedJob, hardware: Hardware, constants: TimeConstants) -> None:
        self.job = job
        self.model = model = job.model
        self.hidden = model.hidden_size
        self.layers = model.num_layers / job.pp
        self.query = model.num_heads * sizes.head_dim(model)  # elements of all heads
        self.key = sizes.num_kv_heads(model) * sizes.head_dim(model)
        self.ffn = sizes.ffn_hidden_size(model)
        self.gated = sizes.is_gated(model.activation)
        self.expert_share = sizes.expert_layers(model) / model.num_layers
        self.parameters = sizes.rank_params(model, job.tp * job.pp, job.ep)  # before data parallelism divides them
        self.hardware = hardware = hardware.shared(job.gpus)
        self.cost = BETWEEN[job.kernels if hardware.gpu else "wide"]
        self.constants = constants
        self.tokens = job.micro_batch * model.seq_len / job.cp
        self.flops = hardware.dense_flops * hardware.power_share
        # Doctor measures a CPU by large products, so they reach all of its rate.
        self.reached = self.flops * (constants.product_rate if hardware.gpu else 1)

    def time(self) -> StepTime:
        job = self.job
        layers = self.layers
        products, attention = self._layer_products().times(layers), self._attention().times(layers)
        head = self._passes(self.tokens, self.model.vocab_size / job.tp, self.hidden)
        forward_between, backward_between = (layers * seconds for seconds in self._between())
        logits = self._traffic_s(self.tokens / job.tp * self.model.vocab_size * self.cost.logit)
        cast = self._traffic_s(job.traffic.cast_bytes * self.parameters * (3 + job.recompute.products))
        again = self._again(products, attention, forward_between)
        tp, cp, ep = (layers * seconds for seconds in (self._tp(), self._cp(), self._ep()))
        count = job.micro_batches
        work = sum(products) + sum(attention) + forward_between + backward_between + again + tp + cp + ep
        parts = {
            "products": count * (sum(products) + sum(head)),
            "attention": count * sum(attention),
            "between": count * (forward_between + backward_between + logits + cast),
            "recompute": count * again,
            "tp": count * tp,
            "bubble": self._bubble(work, products.weights) + self._transfers(),
            "dp": self._dp(work + sum(head) + logits),
            "cp": count * cp,
            "ep": count * ep,
            "update": self._update(),
        }
        parts["host"] = self._host(sum(parts.values()))
        own = self.constants.own
        return StepTime({name: own * part for name, part in parts.items()} | {"fixed": self.constants.step_s})

    def _product(self, rows: float, columns: float, inner: float) -> float:
        """Return the seconds of a product (rows, inner) x (inner, columns)."""
        elements = rows * inner + inner * columns + rows * columns
        if not self.hardware.gpu:
            computing = 2 * rows * columns * inner / self.reached
            return computing + self._traffic_s(WIDE_CAST_BYTES * elements) + self.hardware.launch_s
        waves = ceil(rows / TILE_ROWS) * ceil(columns / TILE_COLUMNS) / self.hardware.units
        fill = waves / ceil(waves)
        rate = self.reached * fill * inner / (inner + self.constants.half_inner)
        moving = 2 * elements / self.hardware.memory_bytes_per_s
        return max(2 * rows * columns * inner / rate, moving) + self.hardware.launch_s

    def _passes(self, rows: float, columns: float, inner: float) -> Passes:
        """Return the seconds of a weight (inner, columns) over `rows` tokens."""
        return Passes(
            self._product(rows, columns, inner),
            self._product(rows, inner, columns),
            self._product(inner, columns, rows),
        )

    def _layer_products(self) -> Passes:
        job, tokens, share = self.job, self.tokens, self.expert_share
        query, key = self.query / job.tp, self.key / job.tp
        projections = [query + 2 * key] if job.fused_projections else [query, key, key]
        passes = [self._passes(tokens, columns, self.hidden) for columns in projections]
        passes.append(self._passes(tokens, self.hidden, query))
        passes += [each.times(1 - share) for each in self._feed_forward(tokens, self.ffn / job.tp)]
        passes = [self._in_fp8(each) for each in passes]
        if (experts := self.model.experts) is not None:
            # Tokens of each expert fill whole tiles; ranks of ep hold other experts and as many tokens.
            each = tokens * experts.top_k * job.ep / experts.num_experts
            filled = tokens * experts.top_k * ceil(each / TILE_ROWS) * TILE_ROWS / each
            of_experts = self._feed_forward(filled, experts.ffn_hidden_size / job.tp)
            if shared := experts.shared_ffn_hidden_size:
                of_experts += self._feed_forward(tokens, shared / job.tp)
            passes += [each.times(share) for each in of_experts]
        return Passes(*map(sum, zip(*passes, strict=True)))

    def _in_fp8(self, passes: Passes) -> Passes:
        job, hardware = self.job, self.hardware
        gain = FP8_REACH * (hardware.fp8_flops or hardware.dense_flops) / hardware.dense_flops
        factor = 1 - job.fp8 + job.fp8 / gain
        return Passes(
            factor * passes.forward, factor * passes.inputs, (factor if job.fp8_weights else 1) * passes.weights
        )

    def _feed_forward(self, tokens: float, inner: float) -> list[Passes]:
        first = self._passes(tokens, inner, self.hidden)
        last = self._passes(tokens, self.hidden, inner)
        return [first, first, last] if self.gated else [first, last]

    def _attention(self) -> Passes:
        """Return the seconds of a layer's scores and weighted sums, which have no weights."""
        model, width = self.model, sizes.head_dim(self.model)
        layers = range(model.num_layers if model.window else 1)  # without windows all are alike
        counted = sum(sizes.attention_flops(model, layer, 2 * self.query) for layer in layers) / len(layers)
        # Forward has four of the twelve parts that the FLOP rule counts, and computes only the causal half of them.
        operations = self.tokens / self.job.tp * counted / 6
        rate = self.flops * self.constants.attention_rate
        if self.hardware.gpu:
            rate *= model.seq_len / (model.seq_len + HALF_RATE_SEQ) * min(1.0, 1.25 * width / (width + 32))
        return Passes(
            operations / (rate * self.hardware.attention_forward),
            2.5 * operations / (rate * self.hardware.attention_backward),
            0.0,
        )

    def _between(self) -> tuple[float, float]:
        """Return the seconds of a layer's operations between products: forward, backward."""
        model, cost = self.model, self.cost
        rotated = self.query + self.key if model.rope else 0
        summed = 2 * (not self.job.fused_projections) + self.gated
        middle, norms = cost.gate if self.gated else cost.activation, 4 if model.norm_place == "both" else 2
        inner = wide = self.ffn * (1 - self.expert_share)
        if (experts := model.experts) is not None:
            inner += self.expert_share * (
                experts.top_k * experts.ffn_hidden_size + (experts.shared_ffn_hidden_size or 0)
            )
        read = 2 * self.hidden + self.query + wide  # inputs of a layer's products, and then their results
        made = 2 * self.hidden + self.query + 2 * self.key + wide * (1 + self.gated)
        cast = [FP8_CAST_BYTES * self.job.fp8 * elements for elements in (read, made)]
        hidden = self.hidden * (self.job.tp if self.job.tp_whole else 1)
        forward, backward = (
            hidden * (norms * cost.norm[way] + 2 * cost.residual[way] + way * summed * cost.addition)
            + inner * middle[way]
            + rotated * cost.rotation[way]
            + self.query * cost.attended[way]
            + cast[way]
            for way in (0, 1)
        )
        tokens = self.tokens / self.job.tp
        return self._traffic_s(forward * tokens), self._traffic_s(backward * tokens)

    def _traffic_s(self, moved: float) -> float:
        return self.constants.traffic * moved / self.hardware.memory_bytes_per_s

    def _again(self, products: Passes, attention: Passes, between: float) -> float:
        share, dense = self.job.recompute, 1 - self.expert_share
        last = dense * self.layers * self._product(self.tokens, self.hidden, self.ffn / self.job.tp)
        communication = 3 / 8 * self.layers * self._tp()  # three of forward's four gathers and scatters
        repeated = share.products * (products.forward - last + communication)
        return repeated + share.attention * attention.forward + share.between * between

    def _link(self, ranks_apart: int, ranks: int) -> float:
        """Return the bytes per second of one rank in a ring over `ranks`, `ranks_apart` devices from each other."""
        size = self.hardware.node_size
        if ranks_apart * ranks <= size:
            return self.hardware.link_bytes_per_s
        in_node = max(1, size // ranks_apart)
        return min(self.hardware.link_bytes_per_s, self.hardware.node_bytes_per_s / size * in_node)

    def _tp(self) -> float:
        """Return the exposed seconds of a layer's gathers and scatters: four in forward, four in backward."""
        job = self.job
        sent = 2 * self.tokens * self.hidden * (job.tp - 1) / job.tp / self._link(1, job.tp)
        exposed = self.constants.tp_exposed * (self.constants.tp_overlapped if job.tp_overlap else 1)
        return 8 * (exposed * sent + (job.tp - 1) * SHORT_HOP_S + log2(job.tp) * self.hardware.wake_s)

    def _cp(self) -> float:
        """Return the seconds of a layer's exchange of positions, none of it hidden."""
        job, query, key = self.job, self.query / self.job.tp, self.key / self.job.tp
        link, share = self._link(job.tp, job.cp), (job.cp - 1) / job.cp
        if job.cp_heads:  # queries, keys, values and results travel, forward and backward
            times, each = 4, query + key
        else:  # keys and values are gathered, and their gradients are scattered; backward gathers again
            times, each = 3, job.cp * 2 * key
        return times * (self.tokens * each * 2 * share / link + log2(job.cp) * self.hardware.wake_s)

    def _ep(self) -> float:
        """Return the seconds of a layer's exchange of tokens: there and back, forward and backward."""
        job, experts = self.job, self.model.experts
        if experts is None:
            return 0.0
        sent = 4 * self.tokens * experts.top_k * self.hidden * 2 * (job.ep - 1) / job.ep
        return self.expert_share * sent / self._link(job.tp * job.cp, job.ep)

    def _bubble(self, work: float, weights: float) -> float:
        """Return the seconds that a pipeline rank waits for others at a step's beginning and end."""
        # Passes over gradients of weights that fill the wait.
        filled = {"interleaved_zero_bubble": 2, "zbv_zero_bubble": 3}.get(self.job.schedule, 0)
        return (self.job.pp - 1) / self.job.stages * max(0.0, work - filled * weights)

    def _transfers(self) -> float:
        """Return the exposed seconds of what pipeline ranks send each other."""
        job = self.job
        sent = min(1, job.pp - 1) * 2 * job.stages * job.micro_batches * 2 * self.tokens * self.hidden / job.tp
        return self._beside(sent / self._link(job.gpus // job.pp, job.pp), inf)

    def _beside(self, seconds: float, window: float) -> float:
        """Return by how much traffic lengthens `window` seconds of computing that hide it. A CPU's cores do both."""
        if not self.hardware.gpu:
            return seconds
        return self.constants.dp_exposed * seconds + max(0.0, seconds - window)

    def _dp(self, micro_batch: float) -> float:
        """Return the exposed seconds of gathers and reductions. They slow the computing that hides them."""
        job, traffic = self.job, self.job.traffic
        apart, ranks = job.tp, job.dp * job.cp
        sent = self.parameters * (traffic.gathers * traffic.gather_bytes + traffic.reductions * traffic.reduce_bytes)
        seconds = sent * (ranks - 1) / ranks / self._link(apart, ranks)
        hops = (traffic.gathers + traffic.reductions) * traffic.pieces * (ranks - 1)
        hop = self.constants.hop_s if apart * ranks > self.hardware.node_size else SHORT_HOP_S
        if job.replicas > 1:  # each rank's shard of the gradients is added up over the replicas
            between = 2 * self.parameters / ranks * traffic.reduce_bytes * (job.replicas - 1) / job.replicas
            seconds += between / self._link(apart * ranks, job.replicas)
            hops += 2 * traffic.pieces * (job.replicas - 1)
            hop = self.constants.hop_s
        window = micro_batch * traffic.hidden_by
        return self._beside(seconds, window) + hops * hop

    def _update(self) -> float:
        job, width = self.job, self.hidden
        owned = sizes.fewest_params(self.model) / (job.tp * job.pp * job.dp * job.cp)
        seconds = owned * job.traffic.update_bytes / self.hardware.memory_bytes_per_s
        if job.muon:  # X X^T, its square and their product with X, on the rank that owns the matrix
            seconds += NEWTON_SCHULZ_STEPS * 6 * width * owned / self.reached
        return seconds

    def _host(self, device: float) -> float:
        """Return the seconds that the device waits for the host."""
        job, tensors = self.job, self.layers * LAYER_TENSORS
        seconds = tensors * (HOST_TENSOR_S + (job.micro_batches - 1) * HOST_AGAIN_S)
        if job.traffic.gathers > 1:
            seconds += job.traffic.gathers * job.traffic.pieces * HOST_GATHER_S
        if not self.hardware.gpu:  # a layer's launches are a part of its products' time there
            return seconds
        seconds += job.micro_batches * self.layers * HOST_LAYER_S
        return max(0.0, seconds - device)

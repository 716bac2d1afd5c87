"""Count the gradients of a real run that are too small for FP16, by layer and step: of activations and of weights.

`python docs/studies/vanishing.py [--small]`. The quickstart's GPT trains in FP32 without a loss scale, so every
gradient is there as it is; each is then sorted by its power of two. Text: the Python standard library's sources, as
the quickstart prepares them (`megamix prepare --corpus stdlib`).
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import study
import torch
from torch import Tensor, nn
from torch.nn import functional

from megamix.config import Config, load_config
from megamix.data.source import TokenFileSource, TokenSpan
from megamix.data.token_file import TokenFile
from megamix.mixed_precision.engine import ShardedEngine
from megamix.model.transformer import Transformer
from megamix.train.objects import build_optimizer, build_precision

BIAS = 127  # of FP32's exponent
SMALLEST_NORMAL, SMALLEST, TOO_LARGE = -14, -24, 16  # FP16's range, as powers of two
SCALES = (0, 4, 8, 12, 16, 20)  # powers of two
SMALL = (
    "model.vocab_size=300", "model.seq_len=64", "model.hidden_size=64", "model.num_layers=2", "model.num_heads=2",
    "training.micro_batch_size=4", "training.global_batch_size=4", "training.steps=9", "lr_schedule.warmup_steps=0",
)  # fmt: skip
FULL = ("training.global_batch_size=8", "training.steps=100")


class Findings(NamedTuple):
    """`activations`, `weights`: layer -> INT64 (watched steps, 256), elements by power of two (see `octaves`)."""

    num_params: int
    tokens: int  # in a batch: the loss is their mean, so each one's gradient carries 1 / tokens
    steps: list[int]
    losses: list[float]
    activations: dict[str, Tensor]
    weights: dict[str, Tensor]


def octaves(values: Tensor) -> Tensor:
    """INT64 (256,): [0] counts exact zeros, [BIAS + p] magnitudes from 2**p to below 2**(p + 1).

    FP32's own subnormals count as 2**-126.
    """
    bits = values.detach().contiguous().view(torch.int32).flatten() & 0x7FFF_FFFF
    exponents = (bits >> 23).clamp(min=1)
    return torch.bincount(exponents.where(bits > 0, 0), minlength=256)


def share(counts: Tensor, first: int, last: int) -> float:
    """Of all elements, those of magnitudes from 2**first to below 2**last. Shapes: counts INT64 (..., 256)."""
    by_octave = counts.reshape(-1, 256).sum(0)
    return int(by_octave[max(1, BIAS + first) : BIAS + last].sum()) / int(by_octave.sum())


def lost(counts: Tensor, scale: int = 0) -> float:
    """The share that is not zero and below 2**-24 after scaling by 2**scale."""
    return share(counts, -BIAS, SMALLEST - scale)


def subnormal(counts: Tensor, scale: int = 0) -> float:
    return share(counts, SMALLEST - scale, SMALLEST_NORMAL - scale)


def zeros(counts: Tensor) -> float:
    return int(counts.reshape(-1, 256)[:, 0].sum()) / int(counts.sum())


class Watch:
    """Sorts gradients into octaves while `is_on`: those of module outputs by hooks, those of weights on demand."""

    def __init__(self, model: Transformer):
        self.is_on = False
        self.activations: dict[str, list[Tensor]] = {}
        self.weights: dict[str, list[Tensor]] = {}
        for name, module in model.named_modules():
            if name in ("head", "norm", "embedding") or name.rpartition(".")[0] == "blocks":
                module.register_forward_hook(self._watch_output(layer_of(name)))

    def _watch_output(self, layer: str) -> Callable[[nn.Module, Any, Tensor], None]:
        def watch(module: nn.Module, inputs: Any, output: Tensor) -> None:
            if self.is_on:
                counts = self.activations.setdefault(layer, [])
                output.register_hook(lambda grad: counts.append(octaves(grad)))  # type: ignore[no-untyped-call]

        return watch

    def read_weights(self, engine: ShardedEngine) -> None:
        """After backward and before step: the gradient buffers hold what backward left, here on the only rank."""
        by_layer: dict[str, Tensor] = {}
        for bucket in engine.buckets:
            for slot in bucket.plan.slots:
                layer = layer_of(slot.spec.name)
                by_layer[layer] = by_layer.get(layer, 0) + octaves(bucket.grads[slot.start : slot.end])
        for layer, counts in by_layer.items():
            self.weights.setdefault(layer, []).append(counts)


def layer_of(name: str) -> str:
    """blocks.0.attention.out.weight -> block 1; embedding.weight -> embedding."""
    first, _, rest = name.partition(".")
    return f"block {int(rest.partition('.')[0]) + 1}" if first == "blocks" else first


def measure(small: bool = False) -> Findings:
    overrides = ("precision.dtype=fp32", "optimizer.compile=false", *(SMALL if small else FULL))
    config = load_config(study.ROOT / "configs/quickstart_adamw.toml", overrides)
    with tempfile.TemporaryDirectory() as folder:
        # Stays readable: the file is open.
        text_file = TokenFile(study.prepare_text(small, Path(folder)) / "train")
    return train(config, text_file, watch_every=4)


def train(config: Config, text_file: TokenFile, watch_every: int) -> Findings:
    torch.manual_seed(config.training.seed)
    model = Transformer(config.model)
    optimizer = build_optimizer(config)
    engine = ShardedEngine(model, optimizer, build_precision(config.precision), clip_grad=config.optimizer.clip_grad)
    seq_len, vocab_size, seed = config.model.seq_len, config.model.vocab_size, config.training.seed
    source = TokenFileSource([TokenSpan.whole(text_file)], seq_len=seq_len, vocab_size=vocab_size, seed=seed)
    watch, batch_size = Watch(model), config.training.micro_batch_size
    steps, losses = [], []
    for step in range(config.training.steps):
        watch.is_on = step % watch_every == 0 or step == config.training.steps - 1
        rows = torch.from_numpy(source.read(range(step * batch_size, (step + 1) * batch_size)).tokens)
        logits = engine(rows[:, :-1])  # with targets the model's loss would never hold them, nor their gradient
        loss = functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        engine.backward(loss)
        if watch.is_on:
            watch.read_weights(engine)
            steps.append(step)
            losses.append(float(loss.detach()))
        engine.step()
    num_params = sum(param.numel() for param in model.parameters())
    activations = {layer: torch.stack(counts) for layer, counts in watch.activations.items()}
    weights = {layer: torch.stack(counts) for layer, counts in watch.weights.items()}
    return Findings(num_params, batch_size * config.model.seq_len, steps, losses, activations, weights)


def text(findings: Findings) -> str:
    heading = (
        f"{findings.num_params / 1e6:.2f} M parameters, {findings.tokens:,} tokens a batch, FP32, "
        f"{findings.steps[-1] + 1} steps, of which {len(findings.steps)} were looked at; nothing scaled."
    )
    return "\n\n".join([heading, by_layer(findings), by_step(findings), by_scale(findings)])


def by_layer(findings: Findings) -> str:
    columns = ["exactly 0", "below 2^-24", "FP16 subnormal"]
    rows = []
    for layer in reversed(in_order(findings.activations)):
        cells = [layer]
        for counts in (findings.activations[layer], findings.weights.get(layer)):
            cells += [study.percent(of(counts)) for of in (zeros, lost, subnormal)] if counts is not None else [""] * 3
        rows.append(cells)
    headings = [f"{kind}: {column}" for kind in ("output", "weights") for column in columns]
    return study.table(["layer", *headings], rows)


def by_step(findings: Findings) -> str:
    kinds = together(findings)
    rows = [
        [f"step {step}", f"{loss:.2f}", *(study.percent(lost(counts[index])) for counts in kinds.values())]
        for index, (step, loss) in enumerate(zip(findings.steps, findings.losses, strict=True))
        if index % 5 == 0 or step == findings.steps[-1]
    ]
    return study.table(["below 2^-24", "loss", *kinds], rows)


def by_scale(findings: Findings) -> str:
    kinds = together(findings)
    rows = []
    for scale in SCALES:
        cells = [
            f"{study.percent(lost(counts, scale))}, {study.percent(subnormal(counts, scale))}"
            for counts in kinds.values()
        ]
        too_large = [share(counts, TOO_LARGE - scale, BIAS) for counts in kinds.values()]
        rows.append([f"2^{scale}", *cells, study.percent(max(too_large))])
    headings = [f"{kind}: below 2^-24, subnormal" for kind in kinds]
    return study.table(["loss scale", *headings, "2^16 or more, at most"], rows)


def together(findings: Findings) -> dict[str, Tensor]:
    """Layers added up: INT64 (watched steps, 256). The logits stand apart, their gradients being the loss's own."""
    inside = [counts for layer, counts in findings.activations.items() if layer != "head"]
    return {
        "logits": findings.activations["head"],
        "activations": torch.stack(inside).sum(0),
        "weights": torch.stack([*findings.weights.values()]).sum(0),
    }


def in_order(layers: Iterable[str]) -> list[str]:
    """As forward runs."""
    return sorted(layers, key=lambda layer: (layer == "head", layer == "norm", layer != "embedding", layer))


def draw(findings: Findings, figure: Any) -> None:
    figure.set_size_inches(9, 3.2)
    kinds = {"outputs of layers": findings.activations, "weights": findings.weights}
    for axes, (title, layer_counts) in zip(figure.subplots(1, 2), kinds.items(), strict=True):
        layers = in_order(layer_counts)
        shares = [[100 * lost(counts) for counts in layer_counts[layer]] for layer in layers]
        image = axes.imshow(
            shares, aspect="auto", origin="lower", cmap="viridis", norm="log", interpolation="nearest",
            extent=(findings.steps[0], findings.steps[-1], -0.5, len(layers) - 0.5), vmin=0.01, vmax=100,
        )  # fmt: skip
        axes.set_yticks(range(len(layers)), layers, fontsize=8)
        axes.set_xlabel("step")
        axes.set_title(f"gradients of {title}", fontsize=10)
    figure.colorbar(image, ax=figure.axes, label="% below 2^-24")


if __name__ == "__main__":
    study.main(__file__, measure, text, draw)

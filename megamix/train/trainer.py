"""The training loop, top to bottom."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from megamix.config import Config
from megamix.data.loader import BatchLoader
from megamix.data.sampler import micro_batches
from megamix.mixed_precision.engine import ShardedEngine
from megamix.train.build import build_loss_scale
from megamix.train.console import Console
from megamix.train.metrics import MetricsWriter, format_line, format_scale
from megamix.train.readout import LAG, Readout, StepValues
from megamix.train.report import IntervalReport

# Seed of the order of validation samples: the same samples at every validation of every run, whatever training's
# seed is.
VALIDATION_SEED = 0


class Trainer:
    """Runs a job's steps. Every rank has one; the first one's speaks and writes."""

    def __init__(
        self,
        config: Config,
        engine: ShardedEngine,
        loader: BatchLoader,
        validation: BatchLoader | None,
        report: IntervalReport,
        console: Console,
        writer: MetricsWriter | None,  # None on all but the first rank
    ):
        self.config, self.engine = config, engine
        self.loader, self.validation = loader, validation
        self.report, self.console, self.writer = report, console, writer
        self.device = engine.half_params.flat[0].device
        self.readout = Readout(self.device)
        self._interval_loss = torch.zeros((), device=self.device)
        self._interval_steps = 0
        self._scaled = build_loss_scale(config.precision) is not None

    def train(self) -> float | None:
        """All steps and the validations. Returns the last validation loss (nats per token), if there is validation
        data.
        """
        steps, eval_interval = self.config.training.steps, self.config.training.eval_interval
        valid_loss = None
        self._announce(0)
        for step in range(steps):
            with self._profiled(step):
                self._step(step)
            if step >= LAG:
                self._log(step - LAG, done=step + 1)
            if eval_interval and (step + 1) % eval_interval == 0 and step + 1 < steps:
                valid_loss = self._validate(step + 1)
        for step in range(max(0, steps - LAG), steps):
            self._log(step, done=steps)
        if self.validation is not None:
            valid_loss = self._validate(steps)
        self.console.close()
        return valid_loss

    def _step(self, step: int) -> None:
        clock, grad_accum_steps = self.engine.clock, self.engine.grad_accum_steps
        loss_sum = torch.zeros((), device=self.device)
        self._announce(step + 1)
        for samples in self._samples(step):
            with clock.span("data"):
                tokens, targets = self._batch(self.loader, samples)
            with clock.span("forward_backward"):
                loss = self.engine(tokens, targets)
                self.engine.backward(loss)
            loss_sum += loss.detach()
        result = self.engine.step()
        self._interval_loss += loss_sum / grad_accum_steps
        self._interval_steps += 1
        loss = self._interval_loss
        if self._is_logged(step):
            loss = self._mean_over_ranks(self._interval_loss / self._interval_steps)
            self._interval_loss = torch.zeros_like(self._interval_loss)
            self._interval_steps = 0
        self.readout.write(
            step, loss, result.grad_norm, result.loss_scale, result.lr, result.found_inf, self.engine.skipped_steps
        )
        self.console.advance()

    def _log(self, step: int, done: int) -> None:
        values = self.readout.read(step)
        steps = self.config.training.steps
        if values.found_inf:
            self._report_overflow(step, values)
        if self._is_logged(step):
            metrics = self.report.metrics(done, values, scaled=self._scaled, device=self.device)
            self.console.line(format_line(step + 1, steps, metrics))
            if self.writer is not None:
                self.writer.write(step + 1, metrics.values())

    def _report_overflow(self, step: int, values: StepValues) -> None:
        self.console.line(
            f"step {step + 1}/{self.config.training.steps} | overflow at loss_scale {format_scale(values.loss_scale)}: "
            f"skipped, nothing changed | skipped {values.skipped_steps}"
        )
        if self.writer is not None:
            self.writer.write(step + 1, {"loss_scale": values.loss_scale, "skipped_steps": values.skipped_steps})

    def _validate(self, done: int) -> float:
        """Mean loss over the validation batches and all ranks, in half precision as trained. Every rank must call
        it.
        """
        assert self.validation is not None
        self.report.pause()
        losses = []
        with torch.no_grad():
            for batch in range(self.config.training.eval_batches):
                for samples in self._samples(batch):
                    losses.append(self.engine(*self._batch(self.validation, samples)))
        loss = self._mean_over_ranks(torch.stack(losses).mean()).item()
        below = math.log(self.config.model.vocab_size) - loss
        self.console.line(
            f"step {done}/{self.config.training.steps} | valid loss {loss:.4f}, {below:.2f} below ln(vocab_size)"
        )
        if self.writer is not None:
            self.writer.write(done, {"valid_loss": loss})
        self.report.resume()
        return loss

    def _batch(self, loader: BatchLoader, samples: range) -> tuple[Tensor, Tensor]:
        batch = loader.get(samples)
        return batch.tokens.to(self.device, non_blocking=True), batch.targets.to(self.device, non_blocking=True)

    def _samples(self, global_batch: int) -> list[range]:
        topology = self.engine.collectives.topology
        return micro_batches(
            global_batch,
            global_batch_size=self.config.training.global_batch_size,
            micro_batch_size=self.config.training.micro_batch_size,
            dp_rank=topology.dp_rank,
            dp_size=topology.dp_size,
        )

    def _announce(self, step: int) -> None:
        if step < self.config.training.steps:
            for samples in self._samples(step):
                self.loader.prefetch(samples)

    def _mean_over_ranks(self, value: Tensor) -> Tensor:
        return self.engine.collectives.table(value.view(1)).mean()

    def _is_logged(self, step: int) -> bool:
        """The first step, so that a newcomer sees a loss soon, then every log_interval steps, and the last one."""
        done = step + 1
        return done == 1 or done % self.config.metrics.log_interval == 0 or done == self.config.training.steps

    @contextmanager
    def _profiled(self, step: int) -> Iterator[None]:
        """Trace the chosen steps into one file per rank, for chrome://tracing or Perfetto."""
        section = self.config.profiling
        if section.num_steps and step == section.start_step:
            self._profiler = torch.profiler.profile()
            self._profiler.start()
        yield
        if section.num_steps and step == section.start_step + section.num_steps - 1:
            # Sends and receives of Gloo that began under the profiler and end after it crash the process.
            self.engine.param_gather.wait_all()
            self._profiler.stop()
            rank = self.engine.collectives.topology.dp_rank
            trace = Path(self.config.checkpoint.folder) / f"trace_rank{rank}.json"
            self._profiler.export_chrome_trace(str(trace))
            self.console.line(
                f"step {step + 1}/{self.config.training.steps} | profile of {section.num_steps} steps in {trace}"
            )

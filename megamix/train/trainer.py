"""The training loop, top to bottom."""

import math
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from functools import partial

import numpy as np
import torch

from megamix.base.console import folded, format_scale
from megamix.base.signals import LeaveRequest
from megamix.data.sampler import Samples, mix64, num_samples
from megamix.launch.exit_status import EndedEarlyError, PreemptedError, SaveFailedError, leaves
from megamix.launch.journal import Reached
from megamix.launch.ledger import COMPILE, SAVING, TRAINED, VALIDATION
from megamix.launch.liveness import Position
from megamix.log.metrics import DETAILED_EVERY, format_lines, load_tags, set_tag
from megamix.log.outcome import Outcome, Readout
from megamix.log.overflows import GaveUpError
from megamix.log.rank_times import RankTimes
from megamix.log.readout import RecordedRows, gather_precision, peak_memory_gib
from megamix.log.scale_search import ScaleSearch
from megamix.mixed_precision.step import Examination, StepResult
from megamix.parallel.micro_batch_runner import MicroBatch
from megamix.train.batch_plan import Attempt, BatchPlan, GlobalBatch, StepOutcome
from megamix.train.batches import Validation
from megamix.train.job import Job
from megamix.train.replicas import check_replicas
from megamix.train.results import write_results
from megamix.train.run_record import Progress

MEMORY_AT_UPDATE = 2  # by then all memory that lives from step to step is allocated


class Trainer:
    """Runs a job's attempts until all updates are applied. Every rank has a trainer; that of the first rank logs and
    writes.
    """

    def __init__(self, job: Job):
        self.job, self.pace, self.start = job, job.pace, job.start
        self.runner, self.engine, self.device = job.runner, job.runner.engine, job.runner.engine.device
        self.batches, self.batch_plan, self.checkpoints = job.batches, job.plan, job.checkpoints
        self.report, self.writer, self.overflows = job.report, job.writer, job.overflows
        self.console, self.journal, self.ledger = job.run.console, job.run.journal, job.run.journal.ledger
        self._compared = False  # whether the time of a step was
        topology = self.engine.topology
        self.readout = Readout(self.device)
        self.recorded = RecordedRows(topology, job.run.ranks.timeout_s)
        self.rank_times = RankTimes(topology, self.recorded, self.device, self.console, self.writer)
        self.scale_search = ScaleSearch(self.engine.loss_scale.min_scale)
        self._examinations: dict[int, Examination] = {}  # by the numbers of attempts in flight
        self._scaled = self.engine.plan.precision.loss_scale is not None
        self._last_overflowed = False  # whether the last outcome was an overflow
        self._first = self.start.applied + 1  # the first update of this start
        self._validated = self.start.validated  # the update after which the last validation was
        self._stop_reason = 0  # the reason to leave on which the ranks have agreed; 0: none
        self._save_intervals = (job.saves.save_interval, job.saves.keep_every)
        job.run.follow(self.position, lambda: Reached(self.batch_plan.applied, self.report.tokens))
        self.console.begin(self.start.applied)

    def run(self) -> float | None:
        """Train, save the last checkpoint, and write the results. Return the last validation loss, or None.

        Raises: EndedEarlyError, as `train`, once the weights are saved.
        """
        valid_loss, early = None, None
        try:
            valid_loss = self.train(self.job.run.ranks.leave)
        except EndedEarlyError as error:
            early = error
            self.journal.tell("leave", reason=str(error))
        self.ledger.enter(SAVING)
        early = self.save_last(early)
        self.console.close()
        # A run that was asked to leave skips the results: it has no time, and will be started again.
        if early is None or isinstance(early, GaveUpError):
            tell_text = None if self.writer is None else self.writer.text
            write_results(self.job.run.folder, self.engine, self.console, early, self.job.sample, tell_text)
            with self.engine.clock.span("save"):
                self.checkpoints.finish_copies()
        if early is not None:
            raise early
        return valid_loss

    def position(self) -> Position:
        """Return the main thread's position, for any thread. A save beside training is not counted as its progress."""
        clock = self.engine.clock
        doing = clock.doing()
        written = self.checkpoints.written if doing == "save" else 0
        return Position(clock.entered, doing, max(self.batch_plan.launched - 1, 0), written)

    def progress(self) -> Progress:
        """Return the progress that a checkpoint keeps beside the engine's state.

        Every rank must call it: attempts in flight are settled.
        """
        while self.batch_plan.must_settle(until=0):
            with suppress(GaveUpError):  # a run that gives up has raised this error before
                self._settle()
        if self.writer is not None:
            self.writer.sync()
        return self._progress()

    def _progress(self) -> Progress:
        return Progress(
            **dict(self.batch_plan.state()),
            skipped=self.overflows.count,
            interval_losses=tuple(loss.hex() for loss in self.report.losses),
            validated=self._validated,
            tokens=self.report.tokens,
        )

    def train(self, leave: LeaveRequest) -> float | None:
        """Take all updates and validations.

        Return the last validation loss (nats per token), or None without validation.
        Raises, on every rank after the same update: GaveUpError if there were too many overflows; PreemptedError if a
        rank was asked to leave; DamagedMemory if the ranks' copies of a parameter or counter differ.
        """
        plan, valid_loss = self.batch_plan, None
        self.ledger.enter(COMPILE)
        self.engine.module.train()
        self.batches.prefetch(plan.next_new())
        if self.engine.loss_scale.wants_probe:
            self.runner.forward_backward(self._load(GlobalBatch(plan.next_new())))
            self.engine.probe_loss_scale()
        for stop in self._stops():
            plan = self._take_size()
            while True:
                # No attempt may pass a stop: a validation or save needs all outcomes, and the weights of update `stop`.
                while plan.must_settle(until=0 if self._stop_reason else stop):
                    self._settle()
                if self._stop_reason and plan.applied < self.pace.steps:
                    raise self._leaves()  # even at a stop; `save_last` decides whether there is time for a save
                if plan.applied == stop:
                    break
                if leave.reason:
                    self.engine.stop_request.fill_(leave.reason)
                attempt = plan.launch()
                if self._last_overflowed or self._is_examined(attempt.number):
                    self.engine.examine_next_step()
                start_s = time.perf_counter()
                with self.job.profiling.attempt(attempt.number, plan.applied):
                    self.runner.forward_backward(self._load(attempt.batch))
                    self.checkpoints.finish_mirror()
                    result = self.engine.step()
                self._note(attempt, result)
                self.ledger.launched(time.perf_counter() - start_s)
                if _is_due(attempt.number, self.job.saves.mirror):
                    while plan.must_settle(until=0):
                        self._settle()
                    with self.engine.clock.span("mirror"):
                        self.checkpoints.mirror(self._progress())
            is_new = self._validated < stop  # False: this update was validated before the run was interrupted
            if is_new and self.job.validation is not None and self._stops_for(stop, self.job.eval_interval):
                valid_loss = self._validate(self.job.validation, stop, leave)
            if stop < self.pace.steps and any(self._stops_for(stop, each) for each in self._save_intervals):
                with self.engine.clock.span("save"):
                    self.ledger.enter(SAVING)
                    self.checkpoints.save(self.progress())
                    self.ledger.enter(TRAINED)
        return valid_loss

    def save_last(self, early: EndedEarlyError | None) -> EndedEarlyError | None:
        """Save the last checkpoint of a run. Return the error with which the run ends, which a failed save may change;
        None if all updates are done.
        """
        with self.engine.clock.span("save"):
            progress = self.progress()
            try:
                if isinstance(early, PreemptedError):
                    return PreemptedError(f"{early}; {self.checkpoints.save_leaving(progress)}")
                self.checkpoints.save_last(progress)
            except SaveFailedError as error:
                # The weights of a run that gave up are written as a finished run's.
                return early if isinstance(early, GaveUpError) else self.checkpoints.save_weights(error, progress)
        return early

    def _take_size(self) -> BatchPlan:
        """Return the plan with batches of the size that the next update has. At a border of the ramp it is another one,
        as after a restart with another `global_batch_size`.
        """
        size = self.pace.batch_size(self.batch_plan.applied)
        if size != self.batch_plan.global_batch_size:
            self.batch_plan = self.batch_plan.with_batches_of(size)
            self.engine.set_grad_accum_steps(self.batches.count(size))
            self.batches.loader.forget()
            self.batches.prefetch(self.batch_plan.next_new())
        return self.batch_plan

    def _stops(self) -> list[int]:
        """Return the coming updates that are followed by a validation, a save or batches of another size. The last one
        ends the run.
        """
        steps = self.pace.steps
        intervals = (self.job.eval_interval, *self._save_intervals)
        stops = {stop for interval in intervals if interval for stop in range(interval, steps, interval)}
        stops |= {first for first, _ in self.pace.sizes if 0 < first < steps}
        return sorted(stop for stop in {*stops, steps} if stop >= self.batch_plan.applied)

    def _stops_for(self, update: int, interval: int) -> bool:
        return update == self.pace.steps or (interval > 0 and update % interval == 0)

    def _note(self, attempt: Attempt, result: StepResult) -> None:
        """Keep a step's result unread until the attempt is settled. Compare the ranks' copies if that is due."""
        self.report.launched(tokens=self._tokens(attempt))
        self.readout.write(attempt.number, result)
        if result.examination is not None:
            self._examinations[attempt.number] = result.examination
        if _is_due(attempt.number, self.job.saves.replica_check_interval):
            with self.engine.clock.span("replica_check"):
                check_replicas(self.engine, self.batch_plan.so_far().counters())

    def _load(self, global_batch: GlobalBatch) -> Iterator[MicroBatch]:
        for samples in self.batches.micro_batches(global_batch.samples):
            with self.engine.clock.span("data"):
                batch = self.batches.loader.load(samples)
            # Not earlier: the reading thread would hold Python's lock while this thread should launch computations.
            self.batches.prefetch(self.batch_plan.next_new())
            yield MicroBatch(batch, self._seed_of_dropout(samples, global_batch.tries))

    def _settle(self) -> None:
        """Read the outcome of the oldest attempt in flight. This is the loop's only wait for the device."""
        attempt = self.batch_plan.oldest()
        outcome = self.readout.read(attempt.number)
        examination = self._examinations.pop(attempt.number, None)
        self._stop_reason = max(self._stop_reason, outcome.stop_requested)
        fate = self.batch_plan.settle(outcome.found_inf, outcome.loss_scale)
        self.ledger.settle(applied=fate is StepOutcome.APPLIED, waited_s=self.engine.clock.total_s["data"])
        # Every overflow names its parameters, but only an examined one names ranks and micro-batches. So the attempt
        # launched next is examined; with requeue and redo it tries the same batch again.
        self._last_overflowed = outcome.found_inf
        if fate is StepOutcome.APPLIED:
            self.report.add(outcome.loss, self._tokens(attempt))
            self.console.advance()
            if self.batch_plan.applied == self._first:
                self.journal.tell("first_step")
        update = self.batch_plan.applied
        if words := self.overflows.note(outcome, examination):
            self._note_overflow(attempt, outcome, fate, words)
        self.overflows.spend(outcome, attempt.number + 1, update)
        if fate is not StepOutcome.APPLIED:
            return
        if searched := self.scale_search.end(outcome.loss_scale):
            self.console.line(searched)
        # Lines are logged for the first update, so that a newcomer sees a loss soon, for every log_interval-th update,
        # and for the last one.
        if update in (1, self.pace.steps) or update % self.job.metrics.log_interval == 0:
            self._log(update, outcome)
        if update == MEMORY_AT_UPDATE:
            self.console.lines(self.job.lines.memory(self.engine))
        if examination is not None and self._is_examined(attempt.number):
            layers = gather_precision(self.engine, examination, outcome)
            if self.writer is not None:
                self.writer.write_precision(update, layers)

    def _note_overflow(self, attempt: Attempt, outcome: Outcome, fate: StepOutcome, words: str) -> None:
        """Record an overflow. Log it, unless it belongs to the search for the first loss scale. Every rank must call
        it.
        """
        step, skipped, loss_scale = self.batch_plan.applied + 1, self.overflows.count, outcome.loss_scale
        recorded = self.recorded.row(outcome)
        if self.writer is not None:
            self.writer.write(step, {"loss_scale": loss_scale, "skipped_steps": skipped}, recorded)
        if fate is StepOutcome.REQUEUED and self.scale_search.takes(self.batch_plan.applied, outcome.loss, loss_scale):
            self.console.show(f"overflow at scale {format_scale(loss_scale)}")
            return
        self.console.line(
            f"step {step}/{self.pace.steps} | overflow at scale {format_scale(loss_scale)}, nothing changed "
            f"| samples {attempt.batch} {fate.value} | overflows {skipped}\n{folded(words)}"
        )
        if fate is StepOutcome.SET_ASIDE:
            for line in self.overflows.origins:
                self.console.line(f"  {line}")
            if self.writer is not None:
                row = {
                    "step": step,
                    "attempt": attempt.number,
                    "samples": [[part.start, len(part)] for part in attempt.batch.samples],
                    "tries": attempt.batch.tries + 1,
                    "loss_scale": loss_scale,
                    "parameters": self.overflows.faults(),
                }
                self.writer.write_set_aside(row)

    def _leaves(self) -> EndedEarlyError:
        return leaves(self._stop_reason, self.batch_plan.applied, self.pace.steps)

    def _log(self, update: int, outcome: Outcome) -> None:
        recorded, counts = self.recorded.row(outcome), self.recorded.counts(outcome)
        memory_gib, skipped = peak_memory_gib(self.device), self.overflows.count
        metrics = self.report.metrics(update, outcome, skipped, scaled=self._scaled, memory_gib=memory_gib)
        steps, interval = self.pace.steps, self.job.metrics.log_interval
        detailed = update in (1, steps) or update % (DETAILED_EVERY * interval) == 0
        self.console.line(format_lines(update, steps, metrics, detailed=detailed, counts=counts))
        if detailed and update > self._first and not self._compared:  # the first interval compiles
            self._compared = True
            if told := self.job.lines.time(self.engine, metrics.tokens_per_s):
                self.console.line(told)
                self.journal.tell("compared", words=told)
        self.console.show(f"loss {metrics.loss:.4f}, {metrics.tokens_per_s:,.0f} tokens/s")
        slowest = self.rank_times.exchange(update, self.report.span_s, detailed=detailed)
        if self.writer is not None:
            self.writer.write(update, asdict(metrics), recorded | load_tags(counts, detailed=detailed) | slowest)

    def _validate(self, validation: Validation, done: int, leave: LeaveRequest) -> float:
        """Return the validation loss (nats per token), and log it. Every rank must call it.

        Raises: PreemptedError between two batches, on every rank between the same ones.
        """
        self.report.pause()
        self.ledger.enter(VALIDATION)
        self.journal.tell("validate_begin")
        measure = partial(validation.losses, before_each=partial(self._leave_if_asked, leave))
        losses = measure()
        by_weights = {"valid_loss": losses}
        if self.engine.average_decay is not None:
            with self.engine.averaged_weights():
                by_weights["average_loss"] = measure()
        self._validated = done
        loss = losses[""]
        below = math.log(self.job.vocab_size) - loss
        told = f"step {done}/{self.pace.steps} | valid loss {loss:.4f}, {below:.2f} below ln(vocab_size)"
        if averages := by_weights.get("average_loss"):
            told += f" | averaged weights {averages['']:.4f}"
        each = ", ".join(f"{name} {loss:.4f}" for name, loss in losses.items() if name)
        self.console.line(f"{told}\n{folded(each)}" if each else told)
        if self.writer is not None:
            tags = {set_tag(name, of): loss for of, their in by_weights.items() for name, loss in their.items() if name}
            self.writer.write(done, {of: each[""] for of, each in by_weights.items()}, tags)
        self.ledger.enter(TRAINED)
        self.journal.tell("validate_end")
        self.report.resume()
        return loss

    def _leave_if_asked(self, leave: LeaveRequest) -> None:
        """Leave if any rank was asked to leave. Outside steps the ranks exchange the request here.

        Raises: PreemptedError, on every rank alike.
        """
        reason = torch.tensor([max(self._stop_reason, leave.reason)], device=self.device)
        self._stop_reason = int(self.engine.world.table(reason).max())
        if self._stop_reason:
            raise self._leaves()

    def _seed_of_dropout(self, samples: Samples, tries: int) -> int | None:
        """Return the seed of a micro-batch's dropout, or None without dropout.

        With this seed the same units drop out on any number of data-parallel ranks and after any restart. In another
        try of the same batch, other units drop out.
        """
        if (seed := self.job.dropout_seed) is None:
            return None
        key = mix64(np.uint64(seed), np.array([samples[0].start], dtype=np.uint64))
        return int(mix64(key[0], np.array([tries], dtype=np.uint64))[0])

    def _tokens(self, attempt: Attempt) -> int:
        return num_samples(attempt.batch.samples) * self.pace.seq_len

    def _is_examined(self, attempt: int) -> bool:
        return _is_due(attempt, self.job.metrics.precision_interval)


def _is_due(attempt: int, interval: int) -> bool:
    """Return whether an attempt is the last of `interval` attempts. With interval 0, none is."""
    return interval > 0 and (attempt + 1) % interval == 0

"""A whole job on this rank: join the others, build model, data and engine, train, leave weights and a sample behind."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from megamix.builders.data import check_unchanged, training_source, validation_source
from megamix.builders.objects import build_engine, build_passes, plan_pipeline
from megamix.checkpoint.together import Together
from megamix.comm.collectives import make_collectives
from megamix.comm.topology import NotMetError, Topology, leave_ranks, local_device, meet_ranks, side_store
from megamix.config import Config, ConfigError, config_to_toml, grad_accum_steps
from megamix.data.loader import BatchLoader
from megamix.inspect.overflows import GaveUpError
from megamix.mixed_precision.engine import ShardedEngine
from megamix.mixed_precision.flat_layout import ParamSpec
from megamix.model.family import parameter_count
from megamix.parallel.build import build_model, drawn, undrawn
from megamix.parallel.stages import describe_stages
from megamix.report.interval_report import IntervalReport, mfu_per_token_rate
from megamix.report.metrics import MetricsWriter, cut_logs
from megamix.report.trackers import start_trackers
from megamix.run import run_folder
from megamix.run.checkpointing import RunCheckpoints
from megamix.run.ranks_agree import known_data
from megamix.run.results import write_results
from megamix.run.resume import Start, find_start, load_start
from megamix.run.resume_rules import no_step_left
from megamix.supervise.console import Console, say, say_phase
from megamix.supervise.liveness import Position, RollCall
from megamix.supervise.run_lock import run_lock
from megamix.supervise.status import (
    EndedEarlyError,
    LeaveRequest,
    NoAnswerError,
    NoMemoryError,
    RunStatus,
    StuckError,
    WrongDataError,
    signals_noted,
)
from megamix.supervise.watchdog import Watchdog, early_end
from megamix.train.trainer import MakeTrainer, MemoryLine, Trainer

# Until which a rank that has written its share waits for the slowest one, if that gets on; else the watchdog ends it.
SAVE_TIMEOUT_S = 6 * 3600.0


def run_job(config: Config, memory_line: MemoryLine | None = None, make: MakeTrainer = Trainer) -> float | None:
    """Train by `config` on the ranks that torchrun started, or alone. Every rank must call it; the first one writes.

    `memory_line`: what the log says of memory after the second update; None: nothing. `make`: the trainer
    of Trainer's arguments, one that watches, say. Returns the last validation loss (nats per token).
    Raises: EndedEarlyError, with what was trained saved, if the run gave up or was asked to leave, and with nothing
    saved if the data were changed under it; ConfigError if another job holds the run's folder, or the ranks were not
    started alike.
    """
    with ExitStack() as stack:
        job = _join(config, stack)
        with _supervised(job):
            valid_loss, early = None, None
            with ExitStack() as files:
                trainer = _build_trainer(job, files, memory_line, make)
                try:
                    valid_loss = trainer.train(job.leave)
                except EndedEarlyError as error:
                    early = error
                early = trainer.save_last(early)
                job.console.close()
                # Who was asked to leave has no time, and comes back.
                if early is None or isinstance(early, GaveUpError):
                    tell_text = None if trainer.writer is None else trainer.writer.text
                    write_results(config, trainer.engine, job.console, early, tell_text)
            if early is not None:
                raise early
    return valid_loss


@dataclass
class Job:
    """What every part of a run shares on this rank, from joining the others to leaving the folder."""

    config: Config
    device: torch.device
    topology: Topology
    together: Together  # between two steps
    leave: LeaveRequest
    launcher: int | None  # its pid
    data_identity: str  # of the files whose fingerprints were compared
    start: Start | None = None
    drawn_bytes: int = 0  # of first weights so far
    engine: ShardedEngine | None = None
    trainer: Trainer | None = None

    def __post_init__(self) -> None:
        self.status = RunStatus(Path(self.config.checkpoint.folder), self.config.training.steps, self._applied)

    @cached_property  # at the first line: a progress bar counts time from when it is made
    def console(self) -> Console:
        return Console(self.config.training.steps, speaks=self.topology.world.rank == 0)

    def on_first_rank(self, work: Callable[[], None]) -> None:
        """Work on the run's folder; the first rank's refusal is every rank's.

        Raises: ConfigError, for an OSError, too, or StuckError, alike on every rank so that all end with one status.
        """
        refusal: ConfigError | StuckError | None = None

        def refused() -> bool | None:
            nonlocal refusal
            try:
                work()
            except OSError as error:
                refusal = ConfigError([f"checkpoint.folder: {error}; write another folder"], "job")
            except (ConfigError, StuckError) as error:
                refusal = error
            return None if refusal is None else isinstance(refusal, StuckError)

        stuck = self.together.first(refused)
        if stuck is not None:
            elsewhere = "the first rank says why"
            raise refusal or (StuckError(elsewhere) if stuck else ConfigError([elsewhere], "job"))

    def take_folder(self, stack: ExitStack) -> None:
        """Hold the run's folder until the end of `stack`. Raises: as `run_lock`, and for another run's folder."""
        self.status.folder.mkdir(parents=True, exist_ok=True)
        stack.enter_context(run_lock(self.status.folder, say=say))
        # Another job may have come and gone since all ranks looked.
        if problems := run_folder.folder_problems(self.config):
            raise ConfigError(problems, "job")

    def begin(self, start: Start, *, claims: bool) -> None:
        """Count this start. With `claims` the folder is this run's from now on; before, only its status is changed."""
        if claims:
            run_folder.claim(self.config)
            cut_logs(self.status.folder, start.progress)
            (self.status.folder / run_folder.GAVE_UP).unlink(missing_ok=True)
        self.status.begin(start.progress.applied, self.config.checkpoint.max_restarts)

    def position(self) -> Position:
        """Return where the main thread stands, for any thread. A save beside training is not what it waits for."""
        if self.trainer is None:
            loaded = 0 if self.engine is None else self.engine.clock.loaded
            return Position(0, "the start", 0, self.drawn_bytes + loaded)
        clock, plan = self.trainer.engine.clock, self.trainer.plan
        doing = clock.doing()
        written = self.trainer.checkpoints.written if doing == "save" else 0
        return Position(clock.entered, doing, max(plan.launched - 1, 0), written)

    def _applied(self) -> int:
        return 0 if self.trainer is None else self.trainer.plan.applied


def _join(config: Config, stack: ExitStack) -> Job:
    """Meet the other ranks, and hold the run's folder until the end of `stack`."""
    launcher = os.getppid() if dist.is_torchelastic_launched() else None
    device, section = local_device(), config.parallelism
    # A moment more than the watchdog's, so that a peer that is missing is named before a collective gives up.
    limit_s = section.timeout_s + 1.0
    if (size := int(os.environ.get("WORLD_SIZE", "1"))) > 1:
        say_phase(f"meeting all {size} ranks")
    try:
        meet_ranks(device, limit_s)
    except NotMetError as error:
        rank = int(os.environ["RANK"])
        if 0 in error.late and {*range(rank)} <= {*error.late}:  # else the first one says it
            say(f"megamix train: {error}", sys.stderr)
        raise NoAnswerError(str(error)) from None
    stack.push(_part)
    data = known_data(config)
    topology = Topology.connect(pp_size=section.pp_size, tp_size=section.tp_size, timeout_s=limit_s)
    # From here on: before, there is nothing to save, and a rank that waits for the others must be free to die.
    leave = stack.enter_context(signals_noted(launched=launcher is not None))
    together = Together(make_collectives(topology.world, device), device)
    job = Job(config, device, topology, together, leave, launcher, data.identity)
    together.every(lambda: None)  # a slower rank may still be checking that the folder is free: it is claimed only now
    job.on_first_rank(lambda: job.take_folder(stack))
    start = job.start = find_start(config, data.fingerprints, together)
    job.on_first_rank(lambda: job.begin(start, claims=False))  # whoever dies in building or loading has started as well
    return job


def _part(kind: object, error: BaseException | None, trace: object) -> None:
    of_some = isinstance(error, NoAnswerError | NoMemoryError | WrongDataError)  # ranks, or of one
    leave_ranks(alike=error is None or (not of_some and isinstance(error, EndedEarlyError | ConfigError)))


@contextmanager
def _supervised(job: Job) -> Iterator[None]:
    """Until the end of the block the ranks watch each other; then the folder's status says how the run ended."""
    world, roll = job.topology.world, None
    try:
        if world.group is not None:
            roll = RollCall(side_store(world), world.rank, world.size)
        with Watchdog(roll, job.config.parallelism.timeout_s, job.status, job.leave, job.launcher, job.position):
            job.together = Together.apart(world, SAVE_TIMEOUT_S)  # watched: connecting may take that long, too
            # Nobody leaves before the first rank has written all: torchrun ends the ranks some time after the first one
            # that left early, and the watchdog takes one that has left for dead.
            try:
                yield
            except EndedEarlyError as early:
                job.together.first(partial(job.status.end, early))
                raise
            job.together.first(partial(job.status.end, None))
    except BaseException as error:
        wrong = early_end(error)
        if world.rank == 0 and (wrong or not isinstance(error, EndedEarlyError)):
            job.status.end(wrong or error)
        if wrong:  # it is of this rank alone: where there are others, the watchdog has told them
            raise wrong from error
        raise


def _build_trainer(job: Job, files: ExitStack, memory_line: MemoryLine | None, make: MakeTrainer) -> Trainer:
    """Model, engine, data and logs; what is open is closed at the end of `files`. From here on the folder is ours."""
    config, device, topology = job.config, job.device, job.topology
    # Half products summed in half, torch's default on GPUs, would contradict that all sums here are FP32.
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    if config.training.deterministic:  # it imports some of the compiler
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # nothing reads it
    torch.manual_seed(config.training.seed)
    stages = plan_pipeline(config)
    update = "; its update is compiled, in a moment where it is cached, else in up to a minute"
    say_phase("building the model" + update * config.optimizer.compile)
    model, placements = build_model(
        config.model, topology, device, stages, sequence_parallel=config.parallelism.sequence_parallel
    )
    accumulation = grad_accum_steps(config, topology.data.size)
    assert job.start is not None
    draw = drawn(model, config.training.seed) if job.start.checkpoint is None else undrawn

    def fill(spec: ParamSpec, start: int, values: Tensor) -> None:
        draw(spec, start, values)
        job.drawn_bytes += values.nbytes

    engine = job.engine = build_engine(config, model, model.units, accumulation, topology, placements, fill)
    job.console.line(_describe(config, engine, device))
    if stages:
        job.console.line(f"pipeline, {config.parallelism.pp_schedule} | {describe_stages(stages)}")
    if job.start.checkpoint is not None:
        say_phase(f"loading {job.start.checkpoint.path}")
    start = load_start(job.start, config, engine)
    if start.checkpoint is not None:
        applied = start.progress.applied  # 0: imported
        what = f"goes on from {start.checkpoint.path} after update {applied}"
        job.console.line(what if applied else f"begins with the weights of {start.checkpoint.path}")
        if applied == config.training.steps:
            job.console.line(f"the run {no_step_left(applied)}; its weights and sample are written again")
        for line in start.lines:
            job.console.line(line)
    job.on_first_rank(lambda: job.begin(start, claims=True))
    loader = files.enter_context(BatchLoader(training_source(config), device))
    held_out = validation_source(config)
    check_unchanged(config, job.data_identity)  # else other data than those that the checkpoints will name
    tokens_per_step = config.training.global_batch_size * config.model.seq_len
    mfu_rate = mfu_per_token_rate(config, topology.world.size, device)
    report = IntervalReport(engine.clock, tokens_per_step, config.training.steps, mfu_rate)
    writer = None
    if topology.world.rank == 0:
        writer = MetricsWriter(
            job.status.folder,
            tensorboard=config.metrics.tensorboard,
            applied=start.progress.applied,
            config=config_to_toml(config),
            tokens=lambda: report.tokens,
            trackers=start_trackers(config),
        )
        files.enter_context(writer)
    job.trainer = make(
        config,
        build_passes(config, engine, model, stages),
        loader,
        None if held_out is None else files.enter_context(BatchLoader(held_out, device)),
        report,
        job.console,
        writer,
        RunCheckpoints(config, engine, start, job.together, job.console, job.leave),
        start.progress,
        memory_line,
    )
    return job.trainer


def _describe(config: Config, engine: ShardedEngine, device: torch.device) -> str:
    """Return two lines that say what runs where, so that a log explains itself."""
    topology = engine.topology
    machine = "CPU, Gloo"
    if device.type == "cuda":
        cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]  # no types
        machine = f"{torch.cuda.get_device_name(device)}, NCCL, cuDNN {cudnn}"
    kept = "".join(f' | {key} = "{it}"' for key, it in config.parallelism if it in ("gradients", "parameters", "owner"))
    numel, buckets = parameter_count(config.model), engine.buckets
    held = sum(bucket.bytes.held() for bucket in buckets)
    return (
        f"megamix | {topology} on {machine} | torch {torch.__version__} | {config.precision.dtype} | "
        f"update {engine.update_path}\n"
        f"{numel / 1e6:.2f} M parameters, {len(buckets)} bucket(s), {held / 2**20:.1f} MiB a rank | "
        f"{config.training.steps} steps of {config.training.global_batch_size} x {config.model.seq_len} tokens, "
        f"accumulation {engine.grad_accum_steps}{kept}"
    )

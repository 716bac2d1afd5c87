"""A whole job on this rank: join the others, build model, data and engine, train, leave weights and a sample behind."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from megamix.checkpoint.together import Together
from megamix.comm.collectives import make_collectives
from megamix.comm.topology import Topology, local_device, side_store, start_ranks
from megamix.config import Config, ConfigError, grad_accum_steps
from megamix.data.loader import BatchLoader
from megamix.data.steady_file import DataError
from megamix.data.tokenizer import open_tokenizer
from megamix.diagnosis.overflow_budget import GaveUpError
from megamix.durable import write_text
from megamix.mixed_precision.engine import ShardedEngine
from megamix.model.sizes import parameter_count
from megamix.model.transformer import Transformer
from megamix.parallel.build import build_model
from megamix.parallel.stages import describe_stages
from megamix.supervise.console import Console, say
from megamix.supervise.liveness import Place, RollCall
from megamix.supervise.run_lock import run_lock
from megamix.supervise.status import (
    EndedEarlyError,
    LeaveRequest,
    PreemptedError,
    RunStatus,
    SaveFailedError,
    StuckError,
    WrongDataError,
    shutdown_s,
    signals_noted,
)
from megamix.supervise.watchdog import Watchdog
from megamix.train import run_folder
from megamix.train.build import build_engine, build_passes, plan_pipeline
from megamix.train.build_data import check_unchanged, training_source, validation_source
from megamix.train.checkpointing import RunCheckpoints
from megamix.train.generate import Sampling, sample_text
from megamix.train.metrics import MetricsWriter, cut_logs
from megamix.train.progress import Progress
from megamix.train.report import IntervalReport, mfu_per_token_rate
from megamix.train.resume import Start, find_start, load_start
from megamix.train.same_job import known_data
from megamix.train.trainer import MemoryLine, Trainer

# Until which a rank that has written its share waits for the slowest one, if that gets on; else the watchdog ends it.
SAVE_TIMEOUT_S = 6 * 3600.0
PROMPT = "def "  # how the sample at the end of a run begins, if the run has a tokenizer


def run_job(config: Config, memory_line: MemoryLine | None = None) -> float | None:
    """Returns the last validation loss. Every rank must call it; the first one writes.

    Raises: EndedEarlyError, with what was trained saved, if the run gave up or was asked to leave, and with nothing
    saved if the data were changed under it; ConfigError if another job holds the run's folder, or the ranks were not
    started alike.
    """
    launcher = os.getppid() if dist.is_torchelastic_launched() else None
    device = local_device()
    section = config.parallelism
    # A moment more than the watchdog's, so that a peer that is missing is named before a collective gives up.
    limit_s = section.timeout_s + 1.0
    start_ranks(device, limit_s)
    try:
        data = known_data(config)
        topology = Topology.connect(pp_size=section.pp_size, tp_size=section.tp_size, timeout_s=limit_s)
        status = RunStatus(Path(config.checkpoint.folder), config.training.steps)
        # From here on: before, there is nothing to save, and a rank that waits for the others must be free to die.
        with signals_noted(shutdown_s(launcher is not None)) as leave, ExitStack() as stack:
            _on_first_rank(lambda: _take_folder(config, status, stack), topology, device)
            together = Together(make_collectives(topology.world, 0, torch.uint8, device), device)
            start = find_start(config, data.fingerprints, together)
            # Whoever dies in building or loading has started as well.
            _on_first_rank(
                partial(status.begin, start.progress.applied, config.checkpoint.max_restarts), topology, device
            )
            return _run(config, topology, device, status, leave, launcher, start, data.identity, memory_line)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _on_first_rank(work: Callable[[], None], topology: Topology, device: torch.device) -> None:
    """Work on the run's folder; the first rank's refusal is every rank's."""
    if topology.world.group is not None:
        dist.barrier()  # a slower rank may still be checking that the folder is free: it is claimed only now
    refusal: ConfigError | StuckError | None = None
    if topology.world.rank == 0:
        try:
            work()
        except OSError as error:
            refusal = ConfigError([f"checkpoint.folder: {error}; write another folder"], "job")
        except (ConfigError, StuckError) as error:
            refusal = error
    row = torch.tensor([refusal is not None, isinstance(refusal, StuckError)], dtype=torch.int32, device=device)
    refused, stuck = make_collectives(topology.world, 0, torch.uint8, device).table(row)[0].tolist()
    if refused:  # alike on every rank, so that all end with one exit status
        elsewhere = "the first rank says why"
        raise refusal or (StuckError(elsewhere) if stuck else ConfigError([elsewhere], "job"))


def _take_folder(config: Config, status: RunStatus, stack: ExitStack) -> None:
    status.folder.mkdir(parents=True, exist_ok=True)
    stack.enter_context(run_lock(status.folder, say=say))
    # Another job may have come and gone since all ranks looked.
    if problems := run_folder.folder_problems(config):
        raise ConfigError(problems, "job")


def _begin(config: Config, status: RunStatus, start: Start) -> None:
    """Nothing but the status is changed before this, and from now on the folder is this run's."""
    run_folder.claim(config)
    cut_logs(status.folder, start.progress)
    (status.folder / run_folder.GAVE_UP).unlink(missing_ok=True)
    status.begin(start.progress.applied, config.checkpoint.max_restarts)


def _run(
    config: Config, topology: Topology, device: torch.device, status: RunStatus, leave: LeaveRequest,
    launcher: int | None, start: Start, data_identity: str, memory_line: MemoryLine | None,
) -> float | None:  # fmt: skip
    """Train, and leave in the folder's status how it ended."""
    try:
        roll = None
        if topology.world.group is not None:
            roll = RollCall(side_store(topology.world), topology.world.rank, topology.world.size)
        together = Together.apart(topology.world, SAVE_TIMEOUT_S)
        with Watchdog(roll, config.parallelism.timeout_s, status, leave, launcher) as watchdog:
            # Nobody leaves before the first rank has written all: torchrun ends the ranks some time after the first one
            # that left early, and the watchdog takes one that has left for dead.
            try:
                args = config, topology, device, status, leave, watchdog, together, start, data_identity, memory_line
                valid_loss = _train(*args)
            except EndedEarlyError as early:
                together.first(partial(status.write, early.state, str(early)))
                raise
            together.first(lambda: status.write("finished"))
            return valid_loss
    except (DataError, WrongDataError) as error:  # the former of a rank alone: where there are others, they are told
        wrong = WrongDataError(str(error))
        if topology.world.rank == 0:
            status.write(wrong.state, str(wrong), wrong.exit_status)
        raise wrong from error
    except EndedEarlyError:
        raise
    except BaseException as error:
        if topology.world.rank == 0:
            notes = getattr(error, "__notes__", [])  # the watchdog's verdict
            status.write("failed", "\n".join([*notes, f"{type(error).__name__}: {error}"]))
        raise


def _train(
    config: Config, topology: Topology, device: torch.device, status: RunStatus, leave: LeaveRequest,
    watchdog: Watchdog, together: Together, start: Start, data_identity: str, memory_line: MemoryLine | None,
) -> float | None:  # fmt: skip
    # Half products summed in half, torch's default on GPUs: all sums here are FP32.
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.manual_seed(config.training.seed)
    stages = plan_pipeline(config)
    model, placements = build_model(
        config.model, topology, device, stages, sequence_parallel=config.parallelism.sequence_parallel
    )
    accumulation = grad_accum_steps(config, topology.dp.size)
    engine = build_engine(config, model, [*model.blocks], accumulation, topology, placements)
    console = Console(config.training.steps, speaks=topology.world.rank == 0)
    console.line(_describe(config, engine, device))
    if stages:
        console.line(f"pipeline, {config.parallelism.pp_schedule} | {describe_stages(stages)}")
    start = load_start(start, config, engine)
    if start.checkpoint is not None:
        console.line(f"goes on from {start.checkpoint.path} after update {start.progress.applied}")
        for line in start.changes:
            console.line(f"changed since: {line}")
    _on_first_rank(lambda: _begin(config, status, start), topology, device)
    checkpoints = RunCheckpoints(config, engine, start, together, console, leave)
    with ExitStack() as stack:
        loader = stack.enter_context(BatchLoader(training_source(config), device))
        held_out = validation_source(config)
        check_unchanged(config, data_identity)  # else other data than those that the checkpoints will name
        validation = None if held_out is None else stack.enter_context(BatchLoader(held_out, device))
        writer = None
        if topology.world.rank == 0:
            writer = stack.enter_context(
                MetricsWriter(status.folder, tensorboard=config.metrics.tensorboard, applied=start.progress.applied)
            )
        report = IntervalReport(
            engine.clock,
            config.training.global_batch_size * config.model.seq_len,
            config.training.steps,
            mfu_per_token_rate(config, topology.world.size, device),
        )
        passes = build_passes(config, engine, model, stages)
        trainer = Trainer(config, passes, loader, validation, report, console, writer, memory_line)
        trainer.begin(start.progress, checkpoints)
        status.update = lambda: trainer.plan.applied
        watchdog.place = partial(_place, trainer)
        valid_loss, early = None, None
        try:
            valid_loss = trainer.train(leave)
        except EndedEarlyError as error:
            early = error
        with engine.clock.span("save"):
            early = _save(trainer.progress(), checkpoints, early)
        console.close()
    if early is None or isinstance(early, GaveUpError):  # who was asked to leave has no time, and will be back
        _write_results(config, model, engine, console, early)
    if early is not None:
        raise early
    return valid_loss


def _save(progress: Progress, checkpoints: RunCheckpoints, early: EndedEarlyError | None) -> EndedEarlyError | None:
    """The last checkpoint of a run. Returns how the run ends, as far as that can still change it."""
    try:
        if isinstance(early, PreemptedError):
            return PreemptedError(f"{early}; {checkpoints.save_leaving(progress)}")
        checkpoints.save_last(progress)
    except SaveFailedError as error:
        return early if isinstance(early, GaveUpError) else error
    return early


def _write_results(
    config: Config, model: Transformer, engine: ShardedEngine, console: Console, gave_up: GaveUpError | None
) -> None:
    """What a run that finished or gave up leaves for use elsewhere. Every rank must call it."""
    folder, topology = Path(config.checkpoint.folder), engine.topology
    with engine.clock.span("weights"):
        weights = engine.full_weights()
        if topology.world.rank == 0:
            path = folder / run_folder.WEIGHTS
            with nullcontext() if gave_up is None else console.telling(path):  # a run that gave up ends as one
                run_folder.write_weights(path, weights)
                console.line(f"weights in FP32: {path}")
    if gave_up is not None:
        if topology.world.rank == 0:
            with console.telling(folder / run_folder.GAVE_UP):
                write_text(folder / run_folder.GAVE_UP, f"{gave_up}\n")
    elif config.data.tokenizer is not None:
        if (first := topology.world.rank == 0) and topology.pp.size > 1:  # no rank of a pipeline has the model whole
            model = Transformer(config.model)
            model.load_state_dict(weights)
            model.to(engine.half_params.dtype)
        if first or (topology.pp.size == 1 and topology.dp.rank == 0):  # those that divide layers compute together
            _write_sample(config, model, config.data.tokenizer, console if first else None)


def _write_sample(config: Config, model: Transformer, tokenizer: str, console: Console | None) -> None:
    """`console`: the first rank's, which writes; the others' is None."""
    path = Path(config.checkpoint.folder) / run_folder.SAMPLE
    model.eval()  # else units would drop out
    sampling = Sampling(max_new_tokens=128, seed=config.training.seed)
    text = sample_text(model, open_tokenizer(Path(tokenizer)), PROMPT, sampling)
    if console is not None:
        with console.telling(path):
            write_text(path, text)
        console.line(f"sample of text ({path}):\n{text}")


def _place(trainer: Trainer) -> Place:
    """Where the main thread stands, for any thread. A save beside training is not what it waits for."""
    clock = trainer.engine.clock
    doing = clock.doing()
    written = trainer.checkpoints.written if doing == "save" else 0
    return Place(clock.entered, doing, max(trainer.plan.launched - 1, 0), written)


def _describe(config: Config, engine: ShardedEngine, device: torch.device) -> str:
    """One line that says what runs where, so that a log explains itself."""
    topology = engine.topology
    machine = "CPU, Gloo"
    if device.type == "cuda":  # pragma: CUDA only
        cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
        machine = f"{torch.cuda.get_device_name(device)}, NCCL, cuDNN {cudnn}"
    numel = parameter_count(config.model)
    resident = engine.layout.resident_bytes(
        engine.half_params.dtype.itemsize, engine.half_grads.flat[0].dtype.itemsize, len(engine.optimizer.state_names)
    )
    return (
        f"megamix | {topology} on {machine} | torch {torch.__version__} | {config.precision.dtype} | "
        f"{numel / 1e6:.2f} M parameters, {len(engine.layout.buckets)} bucket(s), {resident / 2**20:.1f} MiB a rank | "
        f"{config.training.steps} steps of {config.training.global_batch_size} x {config.model.seq_len} tokens, "
        f"accumulation {engine.grad_accum_steps} | update {engine.update_path}"
    )

"""A whole job on this rank, from top to bottom: join the others, build, train, leave weights and a sample."""

from contextlib import ExitStack
from pathlib import Path

import torch

from megamix.builders.data import check_unchanged, training_source, validation_sources
from megamix.builders.objects import build_engine, build_loader, build_runner, plan_pipeline
from megamix.config import Config, first_weights, grad_accum_steps, tokens_of
from megamix.inspect.overflows import GaveUpError
from megamix.mixed_precision.engine import ShardedEngine
from megamix.model.family import parameter_count
from megamix.model.fp8 import in_words
from megamix.parallel.build import build_model, drawn, undrawn
from megamix.parallel.stages import describe_stages
from megamix.report.chosen_trackers import start_trackers
from megamix.report.history import main_settings
from megamix.report.interval_report import IntervalReport, mfu_per_token_rate
from megamix.report.ledger import COMPILE, SAVING, START
from megamix.report.metrics import MetricsWriter
from megamix.run.checkpointing import RunCheckpoints
from megamix.run.results import write_results
from megamix.run.resume import load_start
from megamix.run.run_folder import checkpoint_words
from megamix.supervise.console import phase
from megamix.supervise.status import EndedEarlyError
from megamix.train.joined import join, supervised
from megamix.train.trainer import MakeTrainer, MemoryLine, TimeLine, Trainer


def run_job(
    config: Config,
    memory_line: MemoryLine | None = None,
    make: MakeTrainer = Trainer,
    *,
    time_line: TimeLine | None = None,
) -> float | None:
    """Train by `config` on the ranks that torchrun started, or alone. Every rank must call it; the first one writes.

    `memory_line`: returns the log's line on memory, after the second update; None: no such line. `make`: makes the
    trainer from the arguments of Trainer; a caller may pass its own, for instance to observe the training. `time_line`:
    returns the log's line on time, behind the first detailed line after compiling. Returns the last validation loss
    (nats per token), with several sets the mean over all their targets.
    Raises: EndedEarlyError if the run gave up or was asked to leave, after saving the last weights, or if the data have
    changed during the run, without saving; ConfigError if another job holds the run's folder, or if the ranks were not
    started alike.
    """
    with ExitStack() as stack:
        # 1. The ranks: they meet, hold the run's folder, and agree from where the run goes on.
        job = join(config, stack)
        with supervised(job), ExitStack() as files:  # open files are closed while the watchdog still watches
            # 2. The model, and the engine that takes its weights over.
            _set_torch(config)
            stages = plan_pipeline(config)
            with phase(f"building the model{_COMPILES if config.optimizer.compile else ''}"):
                model, placements = build_model(
                    config.model, config.parallelism, job.topology, job.device, stages, fp8=config.precision.fp8
                )
                packed = config.data.packing == "documents"
                begins_anew = job.start.checkpoint is None
                fill = job.counted(drawn(model, config.training.seed, packed=packed) if begins_anew else undrawn)
                accumulation = grad_accum_steps(config, job.topology.dp.size)
                engine = build_engine(config, model, model.units, accumulation, job.topology, placements, fill)
                del fill  # it may hold the first weights of the whole model
            job.engine = engine  # the watchdog reads this rank's progress from the engine and the trainer
            job.journal.ledger.enter(START)
            job.journal.ledger.move(engine.compile_s, of=START, to=COMPILE)
            console = job.console
            console.line(_describe(config, engine))
            if line := in_words(model, config.precision.fp8, on_cpu=job.device.type == "cpu"):
                console.line(line)
            if begins_anew and (weights := first_weights(config.model)):
                console.line(f"begins with {weights}")
            if stages:
                console.line(f"pipeline, {config.parallelism.pp_schedule} | {describe_stages(stages)}")

            # 3. The state of a run that goes on. From here on the folder is this run's.
            start = job.start = load_start(job.start, config, engine, job.all_or_none)
            for line in filter(None, (*start.told(config), checkpoint_words(config))):
                console.line(line)
            job.on_first_rank(lambda: job.begin(start, claims=True))
            job.journal.tell("loaded")

            # 4. The data, which must be those that the checkpoints will name.
            loader = files.enter_context(build_loader(config, training_source(config), job.device))
            held_out = validation_sources(config)
            check_unchanged(config, job.data_identity)
            validation = {
                name: files.enter_context(build_loader(config, source, job.device)) for name, source in held_out.items()
            }

            # 5. The reports: rates and losses; the first rank writes them down.
            report = _make_report(config, engine)
            writer = None
            if job.topology.world.rank == 0:
                writer = files.enter_context(_make_writer(config, start.progress.applied, report, job.facts))

            # 6. The loop.
            checkpoints = RunCheckpoints(config, engine, start, job.all_or_none, console, job.leave, job.journal.tell)
            runner = build_runner(config, engine, model, stages)
            trainer = job.trainer = make(
                config,
                runner,
                loader,
                validation,
                report,
                console,
                writer,
                checkpoints,
                start.progress,
                memory_line,
                job.journal,
                time_line,
            )
            valid_loss, early = None, None
            try:
                valid_loss = trainer.train(job.leave)
            except EndedEarlyError as error:
                early = error
                job.journal.tell("leave", reason=str(error))
            job.journal.ledger.enter(SAVING)

            # 7. The results. A run that was asked to leave skips them: it has no time, and will be started again.
            early = trainer.save_last(early)
            console.close()
            if early is None or isinstance(early, GaveUpError):
                write_results(config, engine, console, early, None if writer is None else writer.text)
                with engine.clock.span("save"):
                    checkpoints.finish_copies()
            if early is not None:
                raise early
    return valid_loss


_COMPILES = "; its update is compiled, which takes up to a minute unless it is cached"


def _set_torch(config: Config) -> None:
    # torch's default on GPUs may sum half products in half. All sums here are FP32.
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    if config.training.deterministic:  # only then, because the call imports parts of the compiler
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # nothing reads it
    torch.manual_seed(config.training.seed)


def _make_report(config: Config, engine: ShardedEngine) -> IntervalReport:
    whole = tokens_of(config, config.training.steps)
    mfu_rate = mfu_per_token_rate(config, engine.topology.world.size, engine.device)
    return IntervalReport(engine.clock, lambda update: whole - tokens_of(config, update), mfu_rate)


def _make_writer(config: Config, applied: int, report: IntervalReport, facts: dict[str, int | str]) -> MetricsWriter:
    toml = config.text
    return MetricsWriter(
        Path(config.checkpoint.folder),
        tensorboard=config.metrics.tensorboard,
        applied=applied,
        config=toml,
        hparams=main_settings(toml) | facts,
        tokens=lambda: report.tokens,
        trackers=start_trackers(config),
    )


def _describe(config: Config, engine: ShardedEngine) -> str:
    """Return two lines that say what runs where, so that a log explains itself."""
    topology, device = engine.topology, engine.device
    machine = "CPU, Gloo"
    if device.type == "cuda":
        cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]  # untyped in torch
        machine = f"{torch.cuda.get_device_name(device)}, NCCL, cuDNN {cudnn}"
    kept = "".join(f' | {key} = "{it}"' for key, it in config.parallelism if it in ("gradients", "parameters", "owner"))
    numel, buckets = parameter_count(config.model), engine.buckets
    held = sum(bucket.bytes.held() for bucket in buckets)
    return (
        f"megamix | {topology} on {machine} | torch {torch.__version__} | {config.precision.dtype} | "
        f"update {engine.update_path}\n"
        f"{numel / 1e6:.2f} M parameters, {len(buckets)} bucket(s), {held / 2**20:.1f} MiB a rank | "
        f"{config.training.steps} steps of {_batches(config)} x {config.model.seq_len} tokens, "
        f"accumulation {engine.grad_accum_steps}{kept}"
    )


def _batches(config: Config) -> str:
    """Return the sizes of the global batches in words."""
    sizes = [f"{size} from update {first + 1} on" for first, size in config.training.batch_ramp]
    return ", ".join(sizes) or str(config.training.global_batch_size)

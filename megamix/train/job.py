"""A job, built once from its configuration: everything that the training loop works with."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from megamix.base.console import phase
from megamix.config import Config, Pace
from megamix.config.sections import CheckpointConfig, MetricsConfig
from megamix.log.chosen_trackers import start_trackers
from megamix.log.history import main_settings
from megamix.log.interval_report import IntervalReport
from megamix.log.metrics import MetricsWriter
from megamix.log.overflows import OverflowHistory
from megamix.log.profiling import Profiling
from megamix.log.readout import mfu_per_token_rate
from megamix.mixed_precision.engine import ShardedEngine
from megamix.parallel.build import ModelPart
from megamix.parallel.micro_batch_runner import MicroBatchRunner
from megamix.train.batch_plan import BatchPlan
from megamix.train.batches import RankBatches, Validation
from megamix.train.checkpointing import RunCheckpoints
from megamix.train.corpus import JobCorpus
from megamix.train.engine import JobEngine
from megamix.train.mirrors import build_mirror
from megamix.train.objects import DTYPES, build_loader
from megamix.train.results import Sample
from megamix.train.resume import Resume
from megamix.train.run import Run
from megamix.train.run_record import Progress


class Lines(NamedTuple):
    """Functions that return lines of the log which others predict; empty: no such line."""

    memory: Callable[[ShardedEngine], str] = lambda engine: ""  # after the second update
    # From tokens/s, behind the first detailed line after compiling.
    time: Callable[[ShardedEngine, float], str] = lambda engine, tokens_per_s: ""


NO_LINES = Lines()


@dataclass(frozen=True)
class Job:
    """Everything that the loop works with. It is built once, and nothing below it reads the configuration again."""

    run: Run
    runner: MicroBatchRunner  # and with it model and engine
    batches: RankBatches
    validation: Validation | None
    plan: BatchPlan
    checkpoints: RunCheckpoints
    start: Progress  # from which the run goes on
    report: IntervalReport
    writer: MetricsWriter | None  # None on all but the first rank
    profiling: Profiling
    overflows: OverflowHistory
    sample: Sample | None
    lines: Lines
    # what the loop itself decides by
    pace: Pace
    metrics: MetricsConfig
    saves: CheckpointConfig
    eval_interval: int
    vocab_size: int
    dropout_seed: int | None  # None: no dropout


def build(config: Config, run: Run, resume: Resume, corpus: JobCorpus, lines: Lines, files: ExitStack) -> Job:
    """Build all objects of a job on this rank. Every rank must call it. `files`: closes what is opened.

    Nothing else but engine.py reads the whole configuration.
    """
    ranks, topology, device = run.ranks, run.ranks.topology, run.ranks.device
    section, training, pace = config.parallelism, config.training, config.pace

    # 1. The model, and the engine that takes its weights over.
    _set_torch(training.seed, deterministic=training.deterministic)
    begins = resume.start.checkpoint is None
    with phase(f"building the model{_COMPILES if config.optimizer.compile else ''}"):
        part = ModelPart(config.model, section, config.precision.fp8, topology, device)
        taken = resume.start.continuation
        packed = corpus.packed and (begins or taken.phase is not None)
        fill = part.first_weights(training.seed, packed=packed, only=None if begins else taken.drawn)
        engine = JobEngine(config, part, topology, run.counted(fill))
    run.built(engine)
    run.console.lines(_describe(engine, run.parameters, pace), *part.lines)
    if begins:
        run.console.lines(part.begins_with)

    # 2. The state of a run that goes on. From here on the folder is this run's.
    start = resume.load_into(engine, ranks.all_or_none)
    run.console.lines(*resume.start.lines(pace, run.folder), run.kept)
    run.claim(start, resume.record.config, memory=resume.start.is_from_memory)
    mirror = build_mirror(config.checkpoint, engine, run, resume, files)

    # 3. The data, which must be those that the checkpoints will name.
    loader = partial(build_loader, section, device=device, packed=corpus.packed)
    source = files.enter_context(loader(corpus.training(training.seed)))
    batches = RankBatches(source, topology, pace.micro_batch_size)
    size = pace.batch_size(start.applied)
    engine.set_grad_accum_steps(batches.count(size))
    held_out = corpus.validation()
    corpus.require_unchanged(ranks.data.identity)
    sets = {
        name: RankBatches(files.enter_context(loader(source)), topology, pace.micro_batch_size)
        for name, source in held_out.items()
    }

    # 4. The reports: rates and losses; the first rank writes them down.
    rate = mfu_per_token_rate(part.flops_per_token, engine)
    report = IntervalReport(engine.clock, pace.tokens_left, rate)
    report.losses, report.tokens = start.losses(), start.tokens
    writer = None
    if ranks.is_first:
        writer = MetricsWriter(
            run.folder,
            tensorboard=config.metrics.tensorboard,
            applied=start.applied,
            config=config.text,
            hparams=main_settings(config.text) | run.facts,
            tokens=lambda: report.tokens,
            trackers=start_trackers(config.metrics, run.folder, config.model_dump(mode="json")),
        )
        files.enter_context(writer)

    # 5. What the loop goes by.
    runner = part.runner(engine, pace.micro_batch_size)
    sample = None
    if config.data.tokenizer is not None:
        tokenizer, prompt = Path(config.data.tokenizer), config.metrics.sample_prompt
        sample = Sample(tokenizer, prompt, training.seed, pace.steps, part.whole)
    return Job(
        run=run,
        runner=runner,
        batches=batches,
        validation=Validation(runner, sets, training.global_batch_size, training.eval_batches) if sets else None,
        profiling=Profiling(config.profiling, run.folder, engine, run.console, writer),
        plan=BatchPlan(pace.steps, size, config.precision.on_overflow, config.precision.max_retries, start),
        checkpoints=RunCheckpoints(
            config.checkpoint, engine, resume, ranks.all_or_none, run.console, ranks.leave, run.journal.tell, mirror
        ),
        start=start,
        report=report,
        writer=writer,
        overflows=OverflowHistory(config.precision, engine, start.skipped),
        sample=sample,
        lines=lines if ranks.is_first else NO_LINES,
        pace=pace,
        metrics=config.metrics,
        saves=config.checkpoint,
        eval_interval=training.eval_interval,
        vocab_size=config.model.vocab_size,
        dropout_seed=training.seed if config.model.dropout else None,
    )


_COMPILES = "; its update is compiled, which takes up to a minute unless it is cached"


def _set_torch(seed: int, *, deterministic: bool) -> None:
    # torch's default on GPUs may sum half products in half. All sums here are FP32.
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    if deterministic:  # only then, because the call imports parts of the compiler
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # nothing reads it
    torch.manual_seed(seed)


def _describe(engine: ShardedEngine, numel: int, pace: Pace) -> str:
    topology, device, plan = engine.topology, engine.device, engine.plan
    machine = "CPU, Gloo"
    if device.type == "cuda":
        cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]  # untyped in torch
        machine = f"{torch.cuda.get_device_name(device)}, NCCL, cuDNN {cudnn}"
    dtype = next(name for name, it in DTYPES.items() if it == plan.precision.dtype)
    told = {"shard": plan.sharding.shard, "accumulate": plan.sharding.accumulate}
    kept = "".join(f' | {key} = "{it}"' for key, it in told.items() if it not in ("states", "local"))
    held = sum(bucket.bytes.held() for bucket in engine.buckets)
    return (
        f"megamix | {topology} on {machine} | torch {torch.__version__} | {dtype} | "
        f"update {engine.update_path}\n"
        f"{numel / 1e6:.2f} M parameters, {len(engine.buckets)} bucket(s), {held / 2**20:.1f} MiB a rank | "
        f"{pace}, accumulation {engine.grad_accum_steps}{kept}"
    )

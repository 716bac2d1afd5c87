"""The command line: one function per verb. Heavy modules are imported inside the verb, so a mistake shows at once."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megamix.arguments import Parser, add_config, add_verb, check_plugins, lines_told
from megamix.checkpoint.folder import checkpoints_at, folder_of
from megamix.config import Config, ConfigError, config_schema, config_to_toml, load_config, override_meant
from megamix.data import import_extra
from megamix.durable import unwritable
from megamix.hub.command import add_verbs
from megamix.machine import has_gpu, keep_freed_memory, many_imports, tell_torch
from megamix.plugins import PluginError, import_plugins
from megamix.run.least_memory import memory_problem
from megamix.supervise.console import (
    drop_unwritten,
    open_streams,
    say,
    say_on_first_rank,
    say_phase,
    say_unless_first_did,
)
from megamix.supervise.run_lock import refuse_held
from megamix.supervise.status import EndedEarlyError
from megamix.tools.audit.command import add_audit
from megamix.tools.doctor.command import add_doctor
from megamix.tools.plan.command import fit_line, plan_lines
from megamix.tools.plan.limits import memory_of_check
from megamix.tools.verify.command import add_verify

if TYPE_CHECKING:
    from megamix.mixed_precision.engine import ShardedEngine


def main(argv: Sequence[str] | None = None, run: Callable[[argparse.Namespace], int] | None = None) -> int:
    """Run one verb; with `run` do that with its arguments instead. Exit status: 0, 1 for a damaged checkpoint, a layout
    that differs or a job that does not fit, 2 for wrong input, or that of a run that ended early.
    """
    open_streams()
    arguments = _parse(argv)
    try:
        import_plugins(arguments.plugins)
        status: int | None = (run or arguments.run)(arguments)
    except (ConfigError, EndedEarlyError, PluginError) as error:
        # All ranks end early alike; wrong input may be one rank's own, or the RANK itself.
        tell = say_on_first_rank if isinstance(error, EndedEarlyError) else say_unless_first_did
        tell = say if getattr(error, "source", "") == "environment" else tell
        if isinstance(error, ConfigError) and error.source in ("job", "plan"):  # a user knows it by its file
            error = ConfigError(error.problems, str(arguments.config))
        tell(f"megamix {arguments.verb}: {error}", sys.stderr)
        return error.exit_status if isinstance(error, EndedEarlyError) else 2
    finally:
        if arguments.verb == "train":  # whose exit status decides whether it is started again
            drop_unwritten()
    return status or 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Overrides may stand behind a flag as well, where argparse knows no more positional arguments."""
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    if takes_overrides := hasattr(arguments, "overrides"):
        rest = arguments.overrides = [*arguments.overrides, *rest]
    unknown = [text for text in rest if not takes_overrides or "=" not in text or text.startswith("-")]
    if unknown:
        meant = override_meant(unknown) if takes_overrides else None
        fix = meant and f"settings are written section.key=value: {meant}"
        if arguments.verb == "train" and ("gpu" in unknown[0] or "proc" in unknown[0]):
            number = [*unknown[0].split("=")[1:], *unknown[1:2], "2"][0]
            fix = f"ranks are started by NPROC_PER_NODE={number} ./launch/pretrain.sh CONFIG"
        arguments.parser.error(f"unrecognized arguments: {' '.join(unknown)}", fix)
    return arguments


def _parser() -> Parser:
    job = "configs/quickstart.toml checkpoint.folder=runs/mine"
    parser = Parser(prog="megamix", description="Mixed-precision pretraining.", example=f"megamix train {job}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)

    train = add_verb(verbs, "train", _train, "train by a configuration file (many ranks: launch/pretrain.sh)", job)
    add_config(train)
    train.add_argument("--check", action="store_true", help="only look for mistakes, as before a job; start nothing")
    train.add_argument("--memory", metavar="SIZE", help="with --check: what a rank may hold, as 3GiB; refuse more")

    plan_help = "the memory that each rank of a job will need; exit status 1 if that does not fit"
    plan = add_verb(verbs, "plan", lines_told(_plan), plan_help, "job.toml --world 64 --memory 80GiB")
    add_config(plan)
    plan.add_argument("--world", metavar="N", type=int, help="ranks (parallelism.dp_size, or 1)")
    plan.add_argument("--memory", metavar="SIZE", help="what a rank may hold, as 80GiB (this machine's GPU, if any)")
    plan.add_argument("--device", choices=["cpu", "gpu"], help="what the ranks compute on (gpu)")
    plan.add_argument("--json", action="store_true", help="every number, in bytes")

    add_verify(verbs)
    add_audit(verbs)

    texts = "--input my_texts/ --output runs/data/mine"
    _add_prepare(add_verb(verbs, "prepare", lines_told(_prepare), "make tokenizer and token files from text", texts))
    add_verbs(verbs)
    add_doctor(verbs)

    drawn = "a run's curves, loss scale and use of FP16's range"
    plot = add_verb(verbs, "plot", lines_told(_plot), f"draw {drawn} as PNGs in its folder", "runs/mine")
    help = "a run's checkpoint.folder, finished or not; of several the curves are drawn in one picture, in the first"
    plot.add_argument("runs", metavar="RUN", type=Path, nargs="+", help=help)

    checkpoint_help = "look at a run's checkpoints, or hand one to torch"
    _add_checkpoint(add_verb(verbs, "checkpoint", lines_told(_checkpoint), checkpoint_help, "ls runs/mine"))

    bench_help = "measure megamix on this machine's CPU beside torch's own ways to train"
    bench = add_verb(verbs, "bench", _bench, bench_help, "train --rounds 15")
    benches = ["update", "train", "step", "host", "fp16", "overlap", "wire", "muon", "examine", "checkpoint", "startup"]
    bench.add_argument("what", choices=[*benches, "all"], nargs="?", default="train", help="what to measure (train)")
    bench.add_argument("--layout", choices=["tp2", "pp2"], help="whole steps on two ranks that divide the model")
    bench.add_argument("--rounds", metavar="N", type=int, default=15, help="turns of each side (15)")
    bench.add_argument(
        "--output", metavar="FILE", type=Path, default=Path("runs/bench.jsonl"),
        help="a line of JSON with every round is appended to it (runs/bench.jsonl)",
    )  # fmt: skip
    bench.add_argument("--json", action="store_true", help="print that line instead of the tables")

    config_help = "show a configuration with every key that is read, or its schema"
    config = add_verb(verbs, "config", lines_told(_config), config_help, "job.toml --show")
    add_config(config, nargs="?")
    kind = config.add_mutually_exclusive_group(required=True)
    kind.add_argument("--show", action="store_true", help="the effective configuration, with every key that is read")
    kind.add_argument("--schema", action="store_true", help="JSON Schema of a configuration file")
    return parser


def _add_prepare(prepare: argparse.ArgumentParser) -> None:
    text = prepare.add_mutually_exclusive_group()
    text.add_argument("--corpus", choices=["stdlib", "torch"], default="stdlib", help="sources on this machine")
    text.add_argument(
        "--input", metavar="PATH", nargs="+",
        help="files or folders instead: .jsonl, .json (also .gz, .zst), .parquet, .arrow or a dataset saved by "
        "`datasets` hold records, any other file is one document; hf:NAME is loaded by `datasets`",
    )  # fmt: skip
    prepare.add_argument("--output", metavar="DIR", type=Path, required=True, help="reused if it holds the same result")
    prepare.add_argument("--text-key", metavar="KEY", default="text", help="key or column of a record's text (text)")
    prepare.add_argument("--split", metavar="NAME", default="train", help="of a dataset that has splits (train)")
    prepare.add_argument(
        "--tokenizer", metavar="WHAT", default="train",
        help="train: a byte-level BPE on this text (default); bytes; or a tokenizer.json or SentencePiece .model",
    )  # fmt: skip
    prepare.add_argument("--vocab-size", metavar="N", type=int, help="tokens of a tokenizer that is trained (2048)")
    prepare.add_argument("--end-token", metavar="TOKEN", help="ends each document, if the tokenizer's files do not say")
    prepare.add_argument(
        "--valid-fraction", metavar="F", type=float, default=0.05, help="share of the documents kept apart (0.05)"
    )
    prepare.add_argument("--workers", metavar="N", type=int, help="processes that encode (one for each core)")
    prepare.add_argument(
        "--max-bad-records", metavar="N", type=int, default=100,
        help="more stop the run; fewer are left out and listed in bad_records.jsonl (100)",
    )  # fmt: skip


def _add_checkpoint(checkpoint: Parser) -> None:
    actions = checkpoint.add_subparsers(dest="action", metavar="ACTION", required=True)

    def add(name: str, help: str, example: str) -> Parser:
        return actions.add_parser(name, help=help, example=f"megamix checkpoint {name} {example}")

    ls = add("ls", "a line for each: step, time, size, layout, complete, damaged or unfinished", "runs/mine")
    ls.add_argument("path", metavar="RUN_OR_FOLDER", type=Path, help="a run's folder, or a folder of checkpoints")
    verify = add("verify", "read every byte; exit status 1 and the file's name if one is damaged", "runs/mine")
    verify.add_argument("path", metavar="PATH", type=Path, help="a checkpoint, or a folder of them")
    restore = add("restore", "give back its name to what was set aside and is whole", "runs/mine")
    restore.add_argument("path", metavar="PATH", type=Path, help="step_N.damaged-..., or a run's folder: all of it")
    two = "runs/mine/checkpoints/step_00000100 runs/mine/checkpoints/step_00000200"
    diff = add("diff", "what differs: configuration, counters, every state of every parameter", two)
    diff.add_argument("path", metavar="A", type=Path, help="a checkpoint")
    diff.add_argument("other", metavar="B", type=Path, help="another one")
    export = add("export", "full FP32 weights and optimizer states in another format", "runs/mine --to dcp exported")
    export.add_argument("path", metavar="PATH", type=Path, help="a checkpoint, or a run: its newest one")
    export.add_argument("--to", choices=["dcp"], required=True, help="dcp: a folder of torch.distributed.checkpoint")
    export.add_argument("output", metavar="OUT", type=Path, help="what is written; must not be there yet")


def job_of(arguments: argparse.Namespace, tell: Callable[[str], None]) -> Config:
    """Return the configuration that `train` was given; torch is not imported. `tell` gets a line of each key that is
    not read. Raises: ConfigError with everything that is wrong with it and the flags.
    """
    if arguments.memory is not None:
        memory_of_check(arguments.memory, checks=arguments.check)
    config = load_config(arguments.config, arguments.overrides, say=lambda line: tell(f"megamix train: {line}"))
    check_plugins(arguments, config)
    return config


def outlook_of(arguments: argparse.Namespace, config: Config, tell: Callable[[str], None]) -> str:
    """Return what `train --check` says of a job in which it finds no mistake, for the ranks of this environment. `tell`
    gets a line of each thing that trains and is seldom meant. Raises: ConfigError.
    """
    from megamix.run.resume_rules import outlook
    from megamix.run.run_folder import check

    told = check(config, tell)
    if arguments.check:
        _tell_torch(config)
        if too_much := memory_problem(config):
            tell(f"note: {too_much}")  # it may be asked elsewhere than where the job is to run
    told = f"{told}; {outlook(config)}"
    if arguments.memory is not None:
        limit = memory_of_check(arguments.memory, checks=True)
        told = f"{told}\n  {fit_line(config, limit)}"
    return told


def _train(arguments: argparse.Namespace) -> None:
    config = job_of(arguments, say_on_first_rank)
    if arguments.check:
        say_on_first_rank(outlook_of(arguments, config, say_on_first_rank))
        return
    from megamix.run.run_folder import check

    check(config, say_on_first_rank, starts=True)
    _tell_torch(config)
    if too_much := memory_problem(config):
        raise ConfigError([too_much], "job")
    with many_imports():
        say_phase("loading torch")
        from megamix.train.job import run_job

        if config.optimizer.compile:
            from megamix.train.compiler import load_compiler

            load_compiler(config, say_phase)
    if not has_gpu():
        keep_freed_memory()
    run_job(config, _memory_line)


def _tell_torch(config: Config) -> None:
    tell_torch(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), deterministic=config.training.deterministic)


def _memory_line(config: Config, engine: ShardedEngine) -> str:
    """Planned against measured: a job says it, and goes without where the planner cannot be imported."""
    try:
        from megamix.tools.plan.memory_plan import memory_line
    except ImportError as error:
        return f"memory | NOT compared with what was planned: {error}"
    return memory_line(config, engine)


def _plan(arguments: argparse.Namespace) -> Iterator[str]:
    config = load_config(arguments.config, arguments.overrides)
    return plan_lines(config, arguments.world, arguments.memory, arguments.device, arguments.json)


def _prepare(arguments: argparse.Namespace) -> Iterator[str]:
    from megamix.data.prepare.corpus import input_corpus, named_corpus
    from megamix.data.prepare.prepare_corpus import Request, prepare_corpus
    from megamix.data.prepare.tokenizer_choice import TokenizerChoice

    what, vocab_size = arguments.tokenizer, arguments.vocab_size
    vocab_size = 2048 if vocab_size is None and what == "train" else vocab_size
    try:
        request = Request(
            tokenizer=TokenizerChoice(what, vocab_size, arguments.end_token),
            valid_fraction=arguments.valid_fraction,
            text_key=arguments.text_key,
            num_workers=arguments.workers,
            max_bad_records=arguments.max_bad_records,
        )
        corpus = input_corpus(arguments.input, arguments.split) if arguments.input else named_corpus(arguments.corpus)
        yield prepare_corpus(corpus, arguments.output, request).summary() + corpus.passed_over
    except OSError as error:  # the disk, or memory
        raise ValueError(f"{error}; correct that and run the same command again: it continues") from error


def _plot(arguments: argparse.Namespace) -> Iterator[str]:
    import_extra("matplotlib", "plot")
    from megamix.report.plot import plot

    return plot(arguments.runs)


def _checkpoint(arguments: argparse.Namespace) -> Iterator[str]:
    for name in ("path", "other"):  # before the seconds that importing torch takes
        if name in arguments:
            (folder_of if arguments.action in ("ls", "restore") else checkpoints_at)(getattr(arguments, name))
    if arguments.action == "restore":
        for folder in (arguments.path, *arguments.path.absolute().parents[:2]):  # one of them is a run's, if any is
            refuse_held(folder)
    from megamix.checkpoint import actions
    from megamix.run.run_record import check_if_run

    paths = [getattr(arguments, name) for name in ("path", "other", "output") if name in arguments]
    action: Callable[..., Iterator[str]] = getattr(actions, arguments.action)
    return action(*paths, check_if_run)


def _bench(arguments: argparse.Namespace) -> None:
    problems = []
    if arguments.rounds < 1:
        problems.append(f"--rounds: got {arguments.rounds}, must be at least 1; write --rounds 15")
    if arguments.output.is_dir() or unwritable(arguments.output.parent):
        problems.append(f"--output: got {arguments.output}, which cannot be written; name a file in a folder of yours")
    if arguments.layout is not None and arguments.what != "train":
        problems.append(
            f"--layout: got {arguments.layout} with {arguments.what}, but whole steps alone have a layout; "
            f"write megamix bench train --layout {arguments.layout}"
        )
    if problems:
        raise ConfigError(problems, "flags")
    from megamix.tools.bench.benches import run

    run(arguments.layout or arguments.what, arguments.rounds, arguments.output, as_json=arguments.json)


def _config(arguments: argparse.Namespace) -> Iterator[str]:
    if arguments.schema:
        yield json.dumps(config_schema(), indent=2)
        return
    if arguments.config is None:
        raise ConfigError(["config: missing; write megamix config CONFIG --show"], "flags")
    config = load_config(arguments.config, arguments.overrides, say=lambda line: print(f"# {line}"))
    yield config_to_toml(config).removesuffix("\n")

"""The verb `checkpoint` and its actions. torch loads inside."""

import argparse
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

from megamix.base.console import say
from megamix.checkpoint.folder import checkpoints_at, folder_of
from megamix.cli.parser import Parser, lines_told
from megamix.hf.place import find_model
from megamix.launch.run_lock import refuse_held, run_lock


def checkpoint_arguments(parser: Parser) -> None:
    parser.example = "megamix checkpoint ls runs/mine"
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)

    def add(name: str, help: str, example: str) -> Parser:
        return actions.add_parser(name, help=help, example=f"megamix checkpoint {name} {example}")

    ls = add("ls", "list checkpoints: step, time, size, layout, and complete, damaged or unfinished", "runs/mine")
    ls.add_value("path", "RUN_OR_FOLDER", Path, "a run's folder, or a folder of checkpoints")
    verify = add("verify", "read every byte; exit status 1 and the file's name if one is damaged", "runs/mine")
    verify.add_value("path", "PATH", Path, "a checkpoint, or a folder of them")
    restore = add("restore", "give checkpoints that were set aside their names back if they are whole", "runs/mine")
    restore.add_value("path", "PATH", Path, "step_N.damaged-..., or a run's folder for all that it has")
    two = "runs/mine/checkpoints/step_00000100 runs/mine/checkpoints/step_00000200"
    export = add("export", "full FP32 weights and optimizer states in another format", "runs/mine --to dcp exported")
    export.add_value("path", "PATH", Path, "a checkpoint, or a run for its newest checkpoint")
    export.add_argument("--to", choices=["dcp"], required=True, help="dcp: a folder of torch.distributed.checkpoint")
    export.add_value("output", "OUT", Path, "folder to write; must not exist yet")
    average = add(
        "average",
        "the mean of checkpoints of one model, or the weights of one, to evaluate or train on",
        f"{two} --output runs/mean",
    )
    average.add_value("paths", "CHECKPOINT", Path, "checkpoints, or runs", nargs="+")
    average.add_value("--output", "FOLDER", Path, "must not be there yet", required=True)
    copy = add("copy", "copy checkpoints elsewhere, each byte verified", "runs/mine /mnt/copies/mine")
    copy.add_value("path", "PATH", Path, "a checkpoint, or a run for all that it has")
    copy.add_value("output", "FOLDER", Path, "a folder for copies of this run, or of none yet")


@lines_told
def run_checkpoint(arguments: argparse.Namespace) -> Iterator[str]:
    if arguments.action == "average":
        yield from _average(arguments)
        return
    # before the import of torch, which takes seconds
    (folder_of if arguments.action in ("ls", "restore") else checkpoints_at)(arguments.path)
    if arguments.action == "restore":
        # The path, or one of the two folders above it, may be a run's folder.
        for folder in (arguments.path, *arguments.path.absolute().parents[:2]):
            refuse_held(folder)
    from megamix.checkpoint import actions
    from megamix.launch.run_folder import take_for_copies
    from megamix.train.run_record import check_if_run

    paths = [getattr(arguments, name) for name in ("path", "output") if name in arguments]
    action: Callable[..., Iterator[str]] = getattr(actions, arguments.action)
    with ExitStack() as stack:
        if arguments.action == "copy":
            arguments.output.mkdir(parents=True, exist_ok=True)
            stack.enter_context(run_lock(arguments.output, say))
            take_for_copies(arguments.output, arguments.path)
        yield from action(*paths, *[check_if_run] * (arguments.action in ("ls", "verify")))


def _average(arguments: argparse.Namespace) -> Iterator[str]:
    for path in arguments.paths:
        find_model(path)  # before the import of torch
    from megamix.hf.average import average
    from megamix.hf.source import open_source

    sources = [open_source(path) for path in arguments.paths]
    written = average(sources, arguments.output, arguments.progress)
    yield f"{written}: the mean of {', '.join(str(source.path) for source in sources)}"

"""The verb `audit`: it runs the first updates of a job on synthetic text, or of any script, and audits the last one.

It imports no torch before the configuration is read, so that a mistake in it shows at once.
"""

from __future__ import annotations

import argparse
import math
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING

from megamix.base.console import Failed, say
from megamix.cli.parser import Parser, add_config, check_plugins, lines_told
from megamix.config import Config, ConfigError, axis_sizes, load_config
from megamix.tools.verify.core.layout import Layout
from megamix.tools.verify.core.own_size import at_own_size, size_told

if TYPE_CHECKING:
    from megamix.tools.audit.report import AuditReport


def audit_arguments(parser: Parser) -> None:
    parser.example = "megamix audit job.toml, or megamix audit -- python train.py"
    add_config(parser, "TOML file; its token files are not read", nargs="?")
    parser.set_defaults(command=[])
    parser.add_value("--updates", "N", int, "updates; the last one is audited (3)", default=3)
    parser.add_flag("--json", "every share and dtype in full")


@lines_told
def run_audit(arguments: argparse.Namespace) -> Iterator[str]:
    """Yield the page, on the first rank only."""
    updates, least = arguments.updates, 2 if arguments.command else 1
    if updates < least:
        raise ConfigError([f"--updates: got {updates}, must be at least {least}; write --updates 3"], "flags")
    if (arguments.config is None) != bool(arguments.command):
        arguments.parser.error("it takes either CONFIG or -- COMMAND")
    yield from _of_script(arguments) if arguments.command else _of_job(arguments)


def _of_script(arguments: argparse.Namespace) -> Iterator[str]:
    from megamix.tools.audit.script import audit_script  # imports torch

    command, updates = arguments.command, arguments.updates
    say(f"megamix audit: runs {shlex.join(command)} up to its update {updates}, which is audited", sys.stderr)
    seen = audit_script(command, updates, quiet=arguments.json)
    yield _page(arguments, seen.report, f"update {updates} of {shlex.join(command)} on {seen.ranks} rank(s)")
    if seen.waiting:
        still = f"the optimizer of {seen.waiting} parameter(s) made no step meanwhile: not judged"
        say(f"megamix audit: {still}; try another --updates", sys.stderr)
    if seen.unseen:
        say(f"megamix audit: {seen.unseen} tensor(s) that optimizers move match no module: not judged", sys.stderr)


def _page(arguments: argparse.Namespace, report: AuditReport, head: str) -> str:
    updates = arguments.updates
    looked = f"update {updates}" if updates == 1 else f"update {updates}; those before it for NaN alone"
    page = report.to_json() if arguments.json else f"{head}\n{report}\njudged: {looked}; --updates N goes further"
    return Failed(page) if report.harms else page


def _of_job(arguments: argparse.Namespace) -> Iterator[str]:
    """Yield the page of a job.

    It uses the ranks that torchrun started; without torchrun, it starts as many as divide the model.
    """
    config, updates = load_config(arguments.config, arguments.overrides), arguments.updates
    check_plugins(arguments, config.plugins)
    config = at_own_size(config, arguments.overrides)
    section, started = config.parallelism, int(os.environ.get("WORLD_SIZE", "1"))
    others = axis_sizes(section)
    own = math.prod(others.values())
    ranks = max(started, own)
    config = Layout(
        "audit",
        (("dp", ranks // own), *others.items()),
        section.sequence_parallel_ranks > 1,
    ).apply(config)
    config = config.with_keys(optimizer={"compile": False})  # the same dtypes, without 10 s of compiler
    from megamix.comm.topology import leave_ranks, local_device, meet_ranks  # imports torch, which takes seconds
    from megamix.tools.ranks import RankPool

    if started == ranks:
        meet_ranks(local_device(), section.timeout_s)
        report = audit_job(config, updates)
        leave_ranks(alike=True)
    else:
        with RankPool(ranks) as pool:
            report = pool.call(audit_job, config, updates)[0]
    if os.environ.get("RANK", "0") == "0":
        yield _page(arguments, report, f"update {updates} on {ranks} rank(s), synthetic text, {size_told(config)}")


def audit_job(config: Config, updates: int) -> AuditReport:
    """Return the report on update number `updates`. Every rank must call it."""
    from megamix.comm.topology import local_device
    from megamix.tools.audit.audit import audit
    from megamix.tools.audit.report import AuditReport
    from megamix.tools.verify.layouts.observe import MOST_SKIPPED, take_step
    from megamix.train.engine import build_training

    runner, report = build_training(config, local_device()), AuditReport()
    engine = runner.engine
    for attempt in range(updates + MOST_SKIPPED):
        is_last = int(engine.applied_updates) == updates - 1
        with audit(engine.module, engine) if is_last else nullcontext(report) as report:
            take_step(config, runner, attempt)
        if int(engine.applied_updates) == updates:
            break
    return report

"""The verb `verify`: each layout in turn on ranks that this command starts, and a table of what became of it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from megamix.config import Config, ConfigError, check_world_size
from megamix.config.checks import check_config
from megamix.ranks import RankFailure, RankPool
from megamix.verify.judge import Verdict, judge
from megamix.verify.observe import observe

_AXES = {"dp": "dp_size", "tp": "tp_size", "pp": "pp_size"}
UPDATES = 3  # the first has no moments yet, the second both, the third a clip coefficient and scale of its own
OVERFLOW_AT = 1  # in the middle: there is something to leave unchanged, and steps after it
ACCUMULATION = 2  # so that micro-batches are summed and divided by as well
DEADLINE_S = 1800.0
# Columns of the table, and the checks that each one counts.
COLUMNS = {
    "loss": ("loss",),
    "gradients": ("gradient",),
    "norm": ("norm", "largest"),
    "weights": ("weight", "initial weight"),
    "moments": ("exp_avg", "exp_avg_sq", "momentum_buffer", "velocity"),
}


@dataclass(frozen=True, slots=True)
class Layout:
    """How many ranks there are along each axis."""

    name: str
    sizes: tuple[tuple[str, int], ...]  # (axis, ranks), in the order of the name
    sequence_parallel: bool = False

    @property
    def world_size(self) -> int:
        return math.prod(size for _, size in self.sizes)

    def size(self, axis: str) -> int:
        return dict(self.sizes).get(axis, 1)

    def apply(self, config: Config, accumulation: int) -> Config:
        """Return the same training on this layout: `accumulation` micro-batches a step for each data-parallel rank."""
        settings: dict[str, object] = {key: self.size(axis) for axis, key in _AXES.items()}
        settings["sequence_parallel"] = self.sequence_parallel
        batch = config.training.micro_batch_size * self.size("dp") * accumulation
        return config.model_copy(
            update={
                "parallelism": config.parallelism.model_copy(update=settings),
                "training": config.training.model_copy(update={"global_batch_size": batch}),
            }
        )


def parse_layout(name: str) -> Layout:
    """Return the layout of that name. Raises: ValueError for a name that is none."""
    if not re.fullmatch(r"((dp|tp|pp)[1-9]\d*)+(sp)?", name):
        raise ValueError(f"--layouts: got {name}, must name axes and their ranks; write dp2, dp4 or dp2tp2")
    sizes = tuple((axis, int(size)) for axis, size in re.findall(r"(dp|tp|pp)(\d+)", name))
    if len({axis for axis, _ in sizes}) < len(sizes):
        raise ValueError(f"--layouts: got {name}, which names an axis twice; write each one once")
    layout = Layout(name, sizes, name.endswith("sp"))
    if layout.sequence_parallel and layout.size("tp") == 1:
        raise ValueError(f"--layouts: got {name}, but sequence parallel needs tp; write {name[:-2]}tp2sp")
    return layout


def verify_lines(config: Config, names: Sequence[str], failed: list[str]) -> Iterator[str]:
    """Yield what to print, as it becomes known; the layouts that differ or fail are added to `failed`.

    Raises: ConfigError for layouts that cannot be verified.
    """
    layouts = _layouts(config, names)
    yield _row("layout", "attempts", "skipped", *COLUMNS, "")
    pools: dict[int, RankPool] = {}
    try:
        for layout in layouts:
            on_gpus = torch.cuda.is_available() and torch.cuda.device_count() >= layout.world_size
            # Ranks of one number serve all its layouts.
            pool = pools.setdefault(layout.world_size, RankPool(layout.world_size, on_gpus=on_gpus))
            try:
                verdict = verify_layout(config, layout, pool)
            except RankFailure as failure:
                failed.append(layout.name)
                yield f"{layout.name:<14}fails\n{failure}"
                continue
            yield _row(
                layout.name, str(verdict.attempts), str(verdict.skipped), *_shares(verdict),
                "differs" if verdict.differences else "passes",
            )  # fmt: skip
            if verdict.differences:
                failed.append(layout.name)
                yield f"  first: {verdict.differences[0]}"
                more = dict.fromkeys(f"{one.check} of {one.where}" for one in verdict.differences[1:])
                yield f"  and {len(more)} more: {', '.join([*more][:8])}" if more else "  and nothing else"
    finally:
        for pool in pools.values():
            pool.close()
    yield "numbers are the largest error as a share of its bound (docs/parallelism.md); 1 is too much"


def verify_layout(config: Config, layout: Layout, pool: RankPool) -> Verdict:
    """Run one layout on its ranks and judge it."""
    here = _here(config, layout)
    ranks = pool.call(observe, here, UPDATES, OVERFLOW_AT, deadline_s=DEADLINE_S)
    return judge(here, ranks, torch.device("cuda" if pool.on_gpus else "cpu"), UPDATES, OVERFLOW_AT)


def _here(config: Config, layout: Layout) -> Config:
    return layout.apply(config, ACCUMULATION * layout.size("pp"))  # every schedule takes twice its stages


def _layouts(config: Config, names: Sequence[str]) -> list[Layout]:
    problems, layouts = [], []
    for name in names:
        try:
            layouts.append(parse_layout(name))
        except ValueError as error:
            problems.append(str(error))
        else:
            here = _here(config, layouts[-1])
            found = dict.fromkeys([*check_config(here), *check_world_size(here, layouts[-1].world_size)])
            problems += [f"{name}: {problem}" for problem in found]
    if problems:
        raise ConfigError(problems, "verify")
    return layouts


def _shares(verdict: Verdict) -> Iterator[str]:
    for checks in COLUMNS.values():
        shares = [verdict.worst[check] for check in checks if check in verdict.worst]
        yield f"{max(shares):.3f}" if shares else "-"


def _row(*cells: str) -> str:
    return f"{cells[0]:<14}" + "".join(f"{cell:>10}" for cell in cells[1:-1]) + f"  {cells[-1]}".rstrip()

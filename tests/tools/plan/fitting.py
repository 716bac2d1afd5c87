"""The fit of the time model's constants to published rows: `python -m tests.tools.plan.fitting` prints it, and writes
docs/planning_rows.csv.
"""

import csv
import io
import math
import tomllib
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import numpy as np

from megamix.tools.plan.ridge import differentiate, ridge, solve
from megamix.tools.plan.time_constants import FILE, TimeConstants, fitted_constants
from megamix.tools.plan.time_model import step_time
from tests.tools.plan.published import published_rows, settings_of

PAGE = Path(__file__).parents[3] / "docs" / "planning_rows.csv"
HEAD = "program, model, GPUs, tokens, micro-batch, settings, tokens/s a GPU, predicted, %, fitted"
ROW_ERROR, UNPUBLISHED_ERROR = 0.035, 0.1
STACK_SPREAD = 0.06  # of the factors of different programs
KERNEL_SPREAD = 0.2  # of the attention kernel that only MosaicML's rows ran

# Constants that all rows share, one for an attention kernel, and a factor for each stack: 14 in all.
TABLE = tomllib.loads(FILE.read_text(encoding="utf-8"))
SHARED = [name for name in TABLE if name != "own"]
STACKS = sorted({row.stack for row in published_rows()})
NAMES = [*SHARED, "triton", *STACKS]
PRIORS = np.log([*(TABLE[name]["prior"] for name in SHARED), 1.0, *[1.0] * len(STACKS)])
SPREADS = [*(TABLE[name]["spread"] for name in SHARED), KERNEL_SPREAD, *[STACK_SPREAD] * len(STACKS)]
PRECISION = np.diag(np.array(SPREADS) ** -2)

FITTED = [row for row in published_rows() if row.fitted]
MEASURED = np.log([row.seconds for row in FITTED])
ERRORS = np.array([UNPUBLISHED_ERROR if row.unpublished else ROW_ERROR for row in FITTED])


def predict(logs, rows=FITTED):
    """Return the logarithms of the seconds of `rows`."""
    values = dict(zip(NAMES, np.exp(logs).tolist(), strict=True))
    shared = {name: values[name] for name in SHARED}
    kernel = {"mosaic": {"attention_rate": values["triton"]}}
    constants = {stack: TimeConstants(**shared | kernel.get(stack, {}), own=values[stack]) for stack in STACKS}
    return np.log([step_time(row.job, row.hardware, constants[row.stack]).seconds for row in rows])


@cache
def best():
    """Return the constants that explain the fitted rows best."""
    return ridge(predict, MEASURED, ERRORS, PRIORS, PRECISION)


def held_out(group):
    """Return the logarithms of seconds of all published rows, each predicted without the rows of its group, and their
    standard deviations.
    """
    logs, rows = best().logs, published_rows()
    rest, derivatives = MEASURED - predict(logs), differentiate(predict, logs, predict(logs))
    predicted, deviations = np.empty(len(rows)), np.empty(len(rows))
    for name in {group(row) for row in rows}:
        kept = np.array([group(row) != name for row in FITTED])
        # The constants that these rows give alone: one step from the best, which are close.
        alone = solve(derivatives[kept], rest[kept], ERRORS[kept], logs, PRIORS, PRECISION)
        places = [place for place, row in enumerate(rows) if group(row) == name]
        chosen = [rows[place] for place in places]
        predicted[places] = predict(alone.logs, chosen)
        moves = differentiate(partial(predict, rows=chosen), alone.logs, predicted[places])
        variance = np.einsum("ri,ij,rj->r", moves, alone.covariance, moves)
        deviations[places] = np.sqrt(variance + ROW_ERROR**2)
    return predicted, deviations


def span(row):
    """Return the least and the most seconds that are predicted over a row's unknown settings."""
    predicted = predict(best().logs, [replace(row, job=job) for job in settings_of(row)])
    return math.exp(min(predicted)), math.exp(max(predicted))


def table():
    """Return the rows of docs/planning_rows.csv: settings, published and predicted tokens/s, and the error in percent.

    The last ones are of programs without a factor of their own, predicted by the constants alone.
    """
    known, blind = [row for rows in ("stacks", "fp8", "long") for row in published_rows(rows)], published_rows("blind")
    values = fitted_constants().values
    seconds = [*np.exp(predict(best().logs, known))]
    seconds += [step_time(row.job, row.hardware, values).seconds for row in blind]
    return [cells(row, each) for row, each in zip([*known, *blind], seconds, strict=True)]


def cells(row, seconds):
    job = row.job
    tokens = job.step_tokens / job.gpus
    foreseen = f"{tokens / seconds:.0f}"
    if row.unpublished:
        least, most = span(row)
        foreseen += f" ({tokens / most:.0f} to {tokens / least:.0f})"
    return [
        row.stack,
        row.model,
        str(job.gpus),
        str(job.model.seq_len),
        "?" if row.unpublished else str(job.micro_batch),
        row.note,
        f"{tokens / row.seconds:.0f}",
        foreseen,
        f"{100 * (row.seconds / seconds - 1):+.1f}",
        "fitted" if row.fitted else "",
    ]


def table_text():
    """Return the table as CSV."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([HEAD.split(", "), *table()])
    return text.getvalue()


if __name__ == "__main__":
    PAGE.write_text(table_text(), encoding="utf-8")
    for name, log, error in zip(NAMES, best().logs, np.sqrt(np.diag(best().covariance)), strict=True):
        print(f"{name}: value {np.exp(log):.4g}, error {error:.3f}")

"""The fit of the time model's constants to published rows: `python -m tests.tools.plan.fitting` prints it."""

import math
import tomllib
from dataclasses import dataclass, field, replace
from functools import cache, partial

import numpy as np

from megamix.tools.plan.ridge import differentiate, ridge, solve
from megamix.tools.plan.time_constants import FILE, TimeConstants, fitted_constants
from megamix.tools.plan.time_model import step_time
from tests.tools.plan.published import PublishedRow, published_rows, settings_of

ROW_ERROR, UNPUBLISHED_ERROR = 0.035, 0.1
STACK_SPREAD = 0.06  # of the factors of different programs
KERNEL_SPREAD = 0.2  # of the attention kernel that only MosaicML's rows ran


@dataclass(frozen=True)
class PublishedFit:
    """Constants that all rows share, a factor for each stack, and one for an attention kernel: 14 in all."""

    rows: list[PublishedRow]
    table: dict[str, dict[str, float]] = field(default_factory=lambda: tomllib.loads(FILE.read_text(encoding="utf-8")))

    @property
    def names(self):
        return [*self._shared, "triton", *self._stacks]

    @property
    def _shared(self):
        return [name for name in self.table if name != "own"]

    @property
    def _stacks(self):
        return sorted({row.stack for row in published_rows()})

    @property
    def priors(self):
        return np.log([*(self.table[name]["prior"] for name in self._shared), *([1.0] * (1 + len(self._stacks)))])

    @property
    def precision(self):
        shared = [self.table[name]["spread"] for name in self._shared]
        return np.diag(np.array([*shared, KERNEL_SPREAD, *([STACK_SPREAD] * len(self._stacks))]) ** -2)

    @property
    def measured(self):
        return np.log([row.seconds for row in self.rows])

    @property
    def errors(self):
        return np.array([UNPUBLISHED_ERROR if row.unpublished else ROW_ERROR for row in self.rows])

    def predict(self, logs, rows=None):
        """Return the logarithms of the seconds of `rows`, by default the fit's own."""
        values = dict(zip(self.names, np.exp(logs).tolist(), strict=True))
        shared = {name: values[name] for name in self._shared}
        kernel = {"mosaic": {"attention_rate": values["triton"]}}
        constants = {
            stack: TimeConstants(**shared | kernel.get(stack, {}), own=values[stack]) for stack in self._stacks
        }
        chosen = self.rows if rows is None else rows
        return np.log([step_time(row.job, row.hardware, constants[row.stack]).seconds for row in chosen])

    def without(self, fit, kept):
        """Return the constants that the rows of `kept`, a mask, give alone: one step from `fit`, which is close."""
        rest = self.measured - self.predict(fit.logs)
        return solve(derivatives()[kept], rest[kept], self.errors[kept], fit.logs, self.priors, self.precision)


FITTED = PublishedFit([row for row in published_rows() if row.fitted])


@cache
def best():
    """Return the constants that explain the fitted rows best."""
    return ridge(FITTED.predict, FITTED.measured, FITTED.errors, FITTED.priors, FITTED.precision)


@cache
def derivatives():
    """Return the derivatives (rows, constants) of the fitted rows at the best constants."""
    return differentiate(FITTED.predict, best().logs, FITTED.predict(best().logs))


def held_out(group):
    """Return the logarithms of seconds of all published rows, each predicted without the rows of its group, and their
    standard deviations.
    """
    rows, fit = published_rows(), FITTED
    predicted, deviations = np.empty(len(rows)), np.empty(len(rows))
    for name in {group(row) for row in rows}:
        kept = np.array([group(row) != name for row in fit.rows])
        alone = fit.without(best(), kept)
        places = [place for place, row in enumerate(rows) if group(row) == name]
        chosen = [rows[place] for place in places]
        predicted[places] = fit.predict(alone.logs, chosen)
        moves = differentiate(partial(fit.predict, rows=chosen), alone.logs, predicted[places])
        variance = np.einsum("ri,ij,rj->r", moves, alone.covariance, moves)
        deviations[places] = np.sqrt(variance + ROW_ERROR**2)
    return predicted, deviations


def span(row):
    """Return the least and the most seconds that are predicted over a row's unknown settings."""
    predicted = FITTED.predict(best().logs, [replace(row, job=job) for job in settings_of(row)])
    return math.exp(min(predicted)), math.exp(max(predicted))


def table():
    """Return the rows of docs/planning.md: settings, published and predicted tokens/s, and the error in percent.

    The last ones are of programs without a factor of their own, predicted by the constants alone.
    """
    known = [*published_rows(), *published_rows("fp8"), *published_rows("long")]
    blind = published_rows("blind")
    values = fitted_constants().values
    seconds = [*np.exp(FITTED.predict(best().logs, known))]
    seconds += [step_time(row.job, row.hardware, values).seconds for row in blind]
    return [line(row, each) for row, each in zip([*known, *blind], seconds, strict=True)]


def line(row, seconds):
    job = row.job
    tokens = job.step_tokens / job.gpus
    foreseen = f"{tokens / seconds:.0f}"
    if row.unpublished:
        least, most = span(row)
        foreseen += f" ({tokens / most:.0f} to {tokens / least:.0f})"
    cells = [
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
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    print("\n".join(table()))
    for name, log, error in zip(FITTED.names, best().logs, np.sqrt(np.diag(best().covariance)), strict=True):
        print(f"{name}: value {np.exp(log):.4g}, error {error:.3f}")

"""Least squares with priors: constants from measured rows that do not determine all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.linalg import inv
from numpy.typing import NDArray

Vector = NDArray[np.floating]
ROUNDS = 4
STEP = 1e-4  # of a logarithm, for derivatives


class RidgeFit(NamedTuple):
    """Constants as logarithms (n,), and their covariance (n, n)."""

    logs: Vector
    covariance: Vector


def ridge(
    predict: Callable[[Vector], Vector], measured: Vector, errors: Vector, priors: Vector, precision: Vector
) -> RidgeFit:
    """Return the constants that explain the rows best.

    predict: logarithms of seconds (rows,) by logarithms of constants (n,). measured: logarithms of seconds. errors:
    relative standard deviation of each row. priors: logarithms of constants. precision: inverse covariance (n, n) of
    the priors.
    """
    fit = RidgeFit(priors, inv(precision))
    for _ in range(ROUNDS):
        predicted = predict(fit.logs)
        derivatives = differentiate(predict, fit.logs, predicted)
        fit = solve(derivatives, measured - predicted, errors, fit.logs, priors, precision)
    return fit


def solve(
    derivatives: Vector, rest: Vector, errors: Vector, logs: Vector, priors: Vector, precision: Vector
) -> RidgeFit:
    """Return the constants after one step from `logs`. `rest`: what `logs` leaves unexplained."""
    weights = errors**-2
    covariance = inv((derivatives.T * weights) @ derivatives + precision)
    gradient = (derivatives.T * weights) @ rest + precision @ (priors - logs)
    return RidgeFit(logs + covariance @ gradient, covariance)


def differentiate(predict: Callable[[Vector], Vector], logs: Vector, predicted: Vector) -> Vector:
    """Return the derivatives (rows, n) of `predict` at `logs`."""
    steps = STEP * np.eye(len(logs))
    return np.stack([(predict(logs + step) - predicted) / STEP for step in steps], axis=1)

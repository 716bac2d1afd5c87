"""Least squares with priors: constants from measured rows that do not determine all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]
ROUNDS = 4
STEP = 1e-4  # of a logarithm, for derivatives


@dataclass(frozen=True, slots=True)
class RidgeFit:
    """Constants as logarithms (n,), their covariance (n, n), and the derivatives of the rows by them (rows, n)."""

    logs: Vector
    covariance: Vector
    derivatives: Vector


def ridge(
    predict: Callable[[Vector], Vector], measured: Vector, errors: Vector, priors: Vector, precision: Vector
) -> RidgeFit:
    """Return the constants that explain the rows best.

    predict: logarithms of seconds (rows,) by logarithms of constants (n,). measured: logarithms of seconds. errors:
    relative standard deviation of each row. priors: logarithms of constants. precision: inverse covariance (n, n) of
    the priors.
    """
    logs = priors.copy()
    for _ in range(ROUNDS):
        predicted = predict(logs)
        derivatives = differentiate(predict, logs, predicted)
        logs, covariance = solve(derivatives, measured - predicted, errors, logs, priors, precision)
    return RidgeFit(logs, covariance, derivatives)


def solve(
    derivatives: Vector, rest: Vector, errors: Vector, logs: Vector, priors: Vector, precision: Vector
) -> tuple[Vector, Vector]:
    """Return the constants after one step from `logs`, and their covariance. `rest`: what `logs` leaves unexplained."""
    weights = errors**-2
    covariance = inverse((derivatives.T * weights) @ derivatives + precision)
    gradient = (derivatives.T * weights) @ rest + precision @ (priors - logs)
    return logs + covariance @ gradient, covariance


def differentiate(predict: Callable[[Vector], Vector], logs: Vector, predicted: Vector) -> Vector:
    """Return the derivatives (rows, n) of `predict` at `logs`."""
    steps = STEP * np.eye(len(logs))
    return np.stack([(predict(logs + step) - predicted) / STEP for step in steps], axis=1)


def inverse(matrix: Vector) -> Vector:
    return np.asarray(np.linalg.inv(matrix), dtype=np.float64)

"""The statistics behind the cost tables: isotonic regression, and least squares within groups.

Small enough for plain Python: a calibration has some hundred samples and three coefficients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

Features: TypeAlias = tuple[float, float, float]


def rising(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """The nearest sequence that never falls (pool adjacent violators, equal weights).

    A size that noise made cheaper than a smaller one would be chosen again and again.
    """
    pools: list[tuple[float, int]] = []  # mean and number
    for _, value in points:
        mean, num = value, 1
        while pools and pools[-1][0] > mean:
            last, last_num = pools.pop()
            mean, num = (mean * num + last * last_num) / (num + last_num), num + last_num
        pools.append((mean, num))
    values = [mean for mean, num in pools for _ in range(num)]
    return [(size, value) for (size, _), value in zip(points, values, strict=True)]


def least_squares_within(samples: Sequence[tuple[int, Features, float]]) -> Features:
    """Coefficients x >= 0 for  value = (something that depends on the group) + features . x

    A coefficient that nothing determines, or that would be below zero, is 0.

    Args:
        samples: group, features and value of each.
    """
    centred = _centre(samples)
    scales = [max((abs(row[i]) for row, _ in centred), default=0.0) for i in range(3)]
    active = [i for i in range(3) if scales[i] > 0]
    while active:
        rows = [([row[i] / scales[i] for i in active], value) for row, value in centred]
        solved = _solve_normal(rows, len(active))
        if min(solved) >= 0:
            found = dict(zip(active, solved, strict=True))
            r, c, q = (found.get(i, 0.0) / (scales[i] or 1.0) for i in range(3))
            return r, c, q
        del active[solved.index(min(solved))]
    return 0.0, 0.0, 0.0


def _centre(samples: Sequence[tuple[int, Features, float]]) -> list[tuple[list[float], float]]:
    """Features and values less their group's mean."""
    groups: dict[int, list[tuple[Features, float]]] = {}
    for group, features, value in samples:
        groups.setdefault(group, []).append((features, value))
    centred = []
    for members in groups.values():
        means = [sum(features[i] for features, _ in members) / len(members) for i in range(3)]
        middle = sum(value for _, value in members) / len(members)
        for features, value in members:
            centred.append(([features[i] - means[i] for i in range(3)], value - middle))
    return centred


def _solve_normal(rows: Sequence[tuple[list[float], float]], num: int) -> list[float]:
    """Least squares by the normal equations, with a ridge that only matters where they are singular."""
    matrix = [[sum(row[i] * row[j] for row, _ in rows) for j in range(num)] for i in range(num)]
    right = [sum(row[i] * value for row, value in rows) for i in range(num)]
    for i in range(num):
        matrix[i][i] += 1e-9 * max(matrix[j][j] for j in range(num))
    for i in range(num):  # Gauss-Jordan; the matrix is positive definite, so pivots need no search
        pivot = matrix[i][i]
        for j in range(num):
            if j != i:
                factor = matrix[j][i] / pivot
                matrix[j] = [a - factor * b for a, b in zip(matrix[j], matrix[i], strict=True)]
                right[j] -= factor * right[i]
    return [right[i] / matrix[i][i] for i in range(num)]

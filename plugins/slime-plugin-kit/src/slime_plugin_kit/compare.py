"""Equality up to rounding, with a message that names the first difference."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt


def require_same(what: str, got: npt.ArrayLike, expected: npt.ArrayLike, *, tolerance: float = 1e-9) -> None:
    """AssertionError names the entry that differs most, relative to the largest of `expected`."""
    __tracebackhide__ = True
    got, expected = np.asarray(got, np.float64), np.asarray(expected, np.float64)
    assert got.shape == expected.shape, f"{what}: shape {got.shape}, not {expected.shape}"
    if not got.size:
        return
    finite = expected[np.isfinite(expected)]
    scale = max(float(np.abs(finite).max(initial=0.0)), 1e-12)
    equal = (got == expected) | (np.isnan(got) & np.isnan(expected))
    with np.errstate(invalid="ignore"):
        apart = np.where(equal, 0.0, np.abs(got - expected))
    apart = np.where(np.isnan(apart), np.inf, apart)
    worst = np.unravel_index(int(np.argmax(apart)), apart.shape)
    place = f" at {', '.join(map(str, worst))}" if worst else ""
    assert apart[worst] <= tolerance * scale, (
        f"{what}: {got[worst]:.9g}{place}, should be {expected[worst]:.9g} (to {tolerance:g} of the largest, {scale:.3g})"
    )


def require_same_sums(what: str, got: Mapping[str, float], expected: Mapping[str, float], *, tolerance: float) -> None:
    """Metrics by name. Each is compared on its own scale, and not more closely than 1e-12."""
    __tracebackhide__ = True
    assert set(got) == set(expected), f"{what}: metrics {sorted(got)}, not {sorted(expected)}"
    for name, value in expected.items():
        apart = abs(got[name] - value)
        assert got[name] == value or apart <= max(tolerance * abs(value), 1e-9), (
            f"{what}: metric {name} is {got[name]:.9g}, should be {value:.9g}"
        )

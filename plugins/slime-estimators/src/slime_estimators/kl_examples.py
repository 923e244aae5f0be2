"""Anchors for the contract kit: inputs of the KL estimators, with results worked out by hand.

The gaps d = l - ref are 0.5, -2 and 0: exp(-0.5) = 0.606530660, exp(2) = 7.389056099. Then d = -2 with a ratio of 1.5.
"""

from __future__ import annotations

from collections.abc import Sequence

from slime_core.contracts.example import KlExample

LOG_PROBS = (-1.0, -3.0, -0.7)
REFERENCE = (-1.5, -1.0, -0.7)


def _plain(values: Sequence[float], gradient: Sequence[float]) -> KlExample:
    return KlExample(log_probs=LOG_PROBS, ref_log_probs=REFERENCE, values=values, gradient=gradient)


def _weighted(ratio: float, value: float, gradient: float) -> KlExample:
    return KlExample(log_probs=(-3.0,), ref_log_probs=(-1.0,), ratio=(ratio,), values=(value,), gradient=(gradient,))


K1 = (_plain((0.5, -2.0, 0.0), (1.0, 1.0, 1.0)), _weighted(1.5, -3.0, 1.5))
K2 = (_plain((0.125, 2.0, 0.0), (0.5, -2.0, 0.0)), _weighted(1.5, 3.0, -3.0))
K3 = (
    _plain((0.106530660, 4.389056099, 0.0), (0.393469340, -6.389056099, 0.0)),
    _weighted(1.5, 6.583584148, -9.583584148),
)
# The ratio comes before the clamp: 3 x 4.389056099 is beyond 10.
LOW_VAR_KL = (*K3, _weighted(3.0, 10.0, 0.0))

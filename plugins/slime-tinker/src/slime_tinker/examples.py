"""Anchors for the contract kit: inputs with results worked out by hand. Log-probs are about -1 plus ln rho."""

from __future__ import annotations

from slime_core.contracts.example import ExampleSample, LossExample

# rho 1.5, a tool token, 0.5.
_SAMPLES = (
    ExampleSample(
        mask=(1, 0, 1),
        log_probs=(-0.594534892, -3.0, -1.693147181),
        old_log_probs=(-1.0, 0.0, -1.0),
        advantages=(2.0, 5.0, -1.0),
    ),
)
IMPORTANCE_SAMPLING = (LossExample(samples=_SAMPLES, values=((-3.0, 0.0, 0.5),), gradient=((-3.0, 0.0, 0.5),)),)

# Log-ratios 0.5 and -1; -(l A - 0.1 d^2) and -A + 0.2 d.
DRO = (
    LossExample(
        options={"beta": 0.2},
        samples=(
            ExampleSample(
                mask=(1, 0, 1),
                log_probs=(-0.5, -3.0, -2.0),
                old_log_probs=(-1.0, 0.0, -1.0),
                advantages=(2.0, 5.0, -1.0),
            ),
        ),
        values=((1.025, 0.0, -1.9),),
        gradient=((-1.9, 0.0, 0.8),),
    ),
)

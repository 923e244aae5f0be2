"""Anchors for the contract kit: inputs of the advantage and the loss, with results worked out by hand."""

from __future__ import annotations

from slime_core.contracts.example import AdvantageExample, ExampleSample, LossExample

# A tool wrote the second token. The samples need no reward.
_SAMPLES = (
    ExampleSample(mask=(1, 0, 1), old_log_probs=(-1.0, 0.0, -0.5), teacher_log_probs=(-0.25, 0.0, -3.0)),
    ExampleSample(mask=(), old_log_probs=(), teacher_log_probs=()),
    ExampleSample(mask=(0, 0), old_log_probs=(-1.0, -1.0), teacher_log_probs=(-2.0, -2.0)),
    ExampleSample(mask=(1,), reward=5.0, old_log_probs=(-2.0,), teacher_log_probs=(-2.0,)),
)

REVERSE_KL = (
    # The teacher's log-prob is 3/4 nat higher at the first token, 5/2 lower at the third, and equal at the last.
    AdvantageExample(samples=_SAMPLES, advantages=((0.75, 0.0, -2.5), (), (0.0, 0.0), (0.0,))),
    AdvantageExample(
        options={"opd_kl_coef": 0.5}, samples=_SAMPLES, advantages=((0.375, 0.0, -1.25), (), (0.0, 0.0), (0.0,))
    ),
)

SFT = (
    LossExample(
        samples=(
            ExampleSample(mask=(1, 0, 1), log_probs=(-0.5, -7.0, -2.25)),
            ExampleSample(mask=(), log_probs=()),
            ExampleSample(mask=(0, 0), log_probs=(-1.0, -3.0)),
            ExampleSample(mask=(1,), log_probs=(0.0,)),
        ),
        values=((0.5, 0.0, 2.25), (), (0.0, 0.0), (0.0,)),
        gradient=((-1.0, 0.0, -1.0), (), (0.0, 0.0), (-1.0,)),
    ),
)

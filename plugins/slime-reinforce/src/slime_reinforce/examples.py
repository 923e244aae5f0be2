"""Anchors for the contract kit: inputs of the advantage estimators, with results worked out by hand."""

from __future__ import annotations

from slime_core.contracts.example import AdvantageExample, ExampleSample

_UNSCORED = ExampleSample(mask=(1, 1), kl_penalty=(1.0, 1.0))

DISCOUNTED_RETURN = (
    # A tool wrote the second token and the last one.
    AdvantageExample(
        samples=(
            ExampleSample(mask=(1, 0, 1, 1, 0), reward=8.0),
            ExampleSample(mask=(), reward=2.0),
            ExampleSample(mask=(0, 0), reward=3.0),
            ExampleSample(mask=(1, 1)),
        ),
        advantages=((8.0, 0.0, 8.0, 8.0, 0.0), (), (0.0, 0.0), (0.0, 0.0)),
    ),
    # From the end: 8 - 4, then 4/2 - 2, then 0/2 - 1.
    AdvantageExample(
        options={"gamma": 0.5},
        samples=(
            ExampleSample(mask=(1, 0, 1, 1, 0), reward=8.0, kl_penalty=(1.0, 0.0, 2.0, 4.0, 0.0)),
            ExampleSample(mask=(1, 1, 1), reward=-4.0, kl_penalty=(0.0, 0.0, 0.0)),
            _UNSCORED,
        ),
        advantages=((-1.0, 0.0, 0.0, 4.0, 0.0), (-1.0, -2.0, -4.0), (0.0, 0.0)),
    ),
)

# A pair; three rollouts of mean 3; one cut into samples of 0 and 2, which counts as 1, against 3; one on its own.
_REWARDS = (
    *((0, 0, 0.0), (0, 1, 1.0)),
    *((1, 2, 1.0), (1, 3, 2.0), (1, 4, 6.0)),
    *((2, 5, 0.0), (2, 5, 2.0), (2, 6, 3.0)),
    *((3, 7, 4.0),),
)
_COMPARED = tuple(
    ExampleSample(mask=(1,), reward=reward, group=group, rollout=rollout, kl_penalty=(0.25,))
    for group, rollout, reward in _REWARDS
)


def _each(*credit: float) -> tuple[tuple[float, ...], ...]:
    """One advantage per sample, then two of the sample without a reward."""
    return (*((number,) for number in credit), (0.0, 0.0))


GROUP_BASELINE = (
    # Deviations from means of 1/2, 3, 2 and 4, and a penalty of 1/4.
    AdvantageExample(
        samples=(*_COMPARED, _UNSCORED),
        advantages=_each(-0.75, 0.25, -2.25, -1.25, 2.75, -2.25, -0.25, 0.75, -0.25),
    ),
    AdvantageExample(
        options={"disable_rewards_normalization": True},
        samples=(*_COMPARED, _UNSCORED),
        advantages=_each(-0.25, 0.75, 0.75, 1.75, 5.75, -0.25, 1.75, 2.75, 3.75),
    ),
)

LEAVE_ONE_OUT = (
    # Against the other one; against 4, 7/2 and 3/2; against 3, 3 and 1.
    AdvantageExample(
        samples=(*_COMPARED, _UNSCORED),
        advantages=_each(-1.0, 1.0, -3.0, -1.5, 4.5, -3.0, -1.0, 2.0, 0.0),
    ),
    AdvantageExample(
        options={"disable_rewards_normalization": True},
        samples=(*_COMPARED, _UNSCORED),
        advantages=_each(0.0, 1.0, 1.0, 2.0, 6.0, 0.0, 2.0, 3.0, 4.0),
    ),
)

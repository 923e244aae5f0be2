"""Anchors for the contract kit: inputs with results worked out by hand. Log-probs are about -1 plus ln rho."""

from __future__ import annotations

from slime_core.contracts.example import AdvantageExample, ExampleSample, LossExample, ShapingExample

CLIP = (
    # rho 1.1, 1.5, a tool token, 1.5, 0.5, 0.5: inside, clipped above, -, not clipped since A < 0, clipped below, inside.
    LossExample(
        samples=(
            ExampleSample(
                mask=(1, 1, 0, 1),
                log_probs=(-0.904689820, -0.594534892, -3.0, -0.594534892),
                old_log_probs=(-1.0, -1.0, 0.0, -1.0),
                advantages=(2.0, 1.0, 5.0, -2.0),
            ),
            ExampleSample(
                mask=(1, 1),
                log_probs=(-1.693147181, -1.693147181),
                old_log_probs=(-1.0, -1.0),
                advantages=(-1.0, 1.0),
            ),
        ),
        values=((-2.2, -1.2, 0.0, 3.0), (0.8, -0.5)),
        gradient=((-2.2, 0.0, 0.0, 3.0), (0.0, -0.5)),
    ),
    # rho 1.25 and 1.3 around the upper bound of 1.28.
    LossExample(
        options={"eps_clip": 0.2, "eps_clip_high": 0.28},
        samples=(
            ExampleSample(
                mask=(1, 1),
                log_probs=(-0.776856449, -0.737635736),
                old_log_probs=(-1.0, -1.0),
                advantages=(1.0, 1.0),
            ),
        ),
        values=((-1.25, -1.28),),
        gradient=((-1.25, 0.0),),
    ),
    # rho 5 and 2 with A = -1: 5 is more than the dual clip's 3, 2 is not.
    LossExample(
        options={"eps_clip_c": 3.0},
        samples=(
            ExampleSample(
                mask=(1, 1),
                log_probs=(-0.390562088, -1.306852819),
                old_log_probs=(-2.0, -2.0),
                advantages=(-1.0, -1.0),
            ),
        ),
        values=((3.0, 2.0),),
        gradient=((0.0, 2.0),),
    ),
)

# Log-ratios 0.3, -0.1 and a tool token: s = e^0.1 = 1.105170918. Then 0.5 alone: e^0.5 is beyond 1.2.
_TWO_SAMPLES = (
    ExampleSample(
        mask=(1, 1, 0),
        log_probs=(-1.0, -2.0, -3.0),
        old_log_probs=(-1.3, -1.9, -9.0),
        advantages=(2.0, 0.0, 7.0),
    ),
    ExampleSample(mask=(1,), log_probs=(-1.0,), old_log_probs=(-1.5,), advantages=(1.0,)),
)

SEQUENCE_CLIP = (
    # Log-ratios 2e-4, inside; 1e-3 with A = 1, clipped to 1.0004; -1e-3 with A = -1, clipped to 0.9997.
    LossExample(
        samples=tuple(
            ExampleSample(mask=(1,), log_probs=(-1.0,), old_log_probs=(-1.0 - gap,), advantages=(advantage,))
            for gap, advantage in ((2e-4, 1.0), (1e-3, 1.0), (-1e-3, -1.0))
        ),
        values=((-1.00020002,), (-1.0004,), (0.9997,)),
        gradient=((-1.00020002,), (0.0,), (0.0,)),
    ),
    # Both tokens move s: -s A of the first one is shared between them.
    LossExample(
        options={"eps_clip": 0.2, "eps_clip_high": 0.2},
        samples=_TWO_SAMPLES,
        values=((-2.210341836, 0.0, 0.0), (-1.2,)),
        gradient=((-1.105170918, -1.105170918, 0.0), (0.0,)),
    ),
    LossExample(
        options={"eps_clip": 0.2, "eps_clip_high": 0.2, "token_level": True},
        samples=_TWO_SAMPLES,
        values=((-2.210341836, 0.0, 0.0), (-1.2,)),
        gradient=((-2.210341836, 0.0, 0.0), (0.0,)),
    ),
)

CISPO = (
    # rho 2, then 7, of which 5 counts, then 0.01: -w A l, and -w A.
    LossExample(
        samples=(
            ExampleSample(
                mask=(1, 1, 1),
                log_probs=(-1.0, -0.5, -3.0),
                old_log_probs=(-1.693147181, -2.445910149, 1.605170186),
                advantages=(1.0, -3.0, -2.0),
            ),
        ),
        values=((2.0, -7.5, -0.06),),
        gradient=((-2.0, 15.0, 0.02),),
    ),
    # A lower bound of 0.8 raises rho 0.5.
    LossExample(
        options={"eps_clip": 0.2, "eps_clip_high": None},
        samples=(ExampleSample(mask=(1,), log_probs=(-2.0,), old_log_probs=(-1.306852819,), advantages=(3.0,)),),
        values=((4.8,),),
        gradient=((-2.4,),),
    ),
)

# A pair; three rollouts of mean 3 and std sqrt(7); one cut into samples of 0 and 2, which counts as 1, against 3; one
# on its own; one without a reward.
_REWARDS = (
    (0, 0, 0.0),
    (0, 1, 1.0),
    (1, 2, 1.0),
    (1, 3, 2.0),
    (1, 4, 6.0),
    (2, 5, 0.0),
    (2, 5, 2.0),
    (2, 6, 3.0),
    (3, 7, 4.0),
)
_COMPARED = tuple(
    ExampleSample(mask=(1,), reward=reward, group=group, rollout=rollout) for group, rollout, reward in _REWARDS
)
_UNSCORED = ExampleSample(mask=(1,), group=0, rollout=8)


def _each(*credit: float) -> tuple[tuple[float], ...]:
    return tuple((number,) for number in credit)


GROUP_NORM = (
    AdvantageExample(
        samples=(*_COMPARED, _UNSCORED),
        advantages=_each(
            -0.7071058, 0.7071058, -0.7559286, -0.3779643, 1.1338929, -1.4142126, 0.0, 0.7071063, 0.0, 0.0
        ),
    ),
    AdvantageExample(
        options={"disable_grpo_std_normalization": True},
        samples=(*_COMPARED, _UNSCORED),
        advantages=_each(-0.5, 0.5, -2.0, -1.0, 3.0, -2.0, 0.0, 1.0, 0.0, 0.0),
    ),
    AdvantageExample(
        options={"disable_rewards_normalization": True},
        samples=(*_COMPARED, _UNSCORED),
        advantages=_each(0.0, 1.0, 1.0, 2.0, 6.0, 0.0, 2.0, 3.0, 4.0, 0.0),
    ),
)

OVERLONG = (
    # At most 20 tokens, the last 8 of them punished: 10 is free, 14 costs 2/8, 20 all; tool tokens do not count.
    ShapingExample(
        options={"overlong_buffer_len": 8, "overlong_penalty_factor": 0.5},
        max_response_len=20,
        samples=(
            ExampleSample(mask=(1,) * 10, reward=1.0),
            ExampleSample(mask=(1,) * 14 + (0,) * 5, reward=1.0),
            ExampleSample(mask=(1,) * 20, reward=0.0),
        ),
        rewards=(1.0, 0.875, -0.5),
    ),
)

"""Anchors for the contract kit: inputs with results worked out by hand."""

from __future__ import annotations

from slime_core.contracts.example import AdvantageExample, ExampleSample, LossExample

GAE = (
    # gamma = lambda = 1: the advantage is reward minus value, and the return is the reward.
    AdvantageExample(
        samples=(
            ExampleSample(mask=(1, 0, 1), reward=1.0, values=(0.5, 9.0, 0.25)),
            ExampleSample(mask=(1,), reward=0.0, values=(0.5,)),
        ),
        advantages=((0.5, 0.0, 0.75), (-0.5,)),
        returns=((1.0, 0.0, 1.0), (0.0,)),
    ),
    # A tool's token between two trained ones, and a KL penalty on the first. delta_2 = 1 - 0.25 = 0.75;
    # delta_1 = -0.125 + 0.5 x 0.25 - 0.5 = -0.5; A_1 = -0.5 + 0.5 x 0.5 x 0.75 = -0.3125.
    AdvantageExample(
        options={"gamma": 0.5, "lambd": 0.5},
        samples=(ExampleSample(mask=(1, 0, 1), reward=1.0, values=(0.5, 9.0, 0.25), kl_penalty=(0.125, 0.0, 0.0)),),
        advantages=((-0.3125, 0.0, 0.75),),
        returns=((0.1875, 0.0, 1.0),),
    ),
    # lambda 0: one step ahead only.
    AdvantageExample(
        options={"gamma": 1.0, "lambd": 0.0},
        samples=(ExampleSample(mask=(1, 1), reward=-1.0, values=(0.5, 0.75)),),
        advantages=((0.25, -1.75),),
        returns=((0.75, -1.0),),
    ),
)

VALUE = (
    # Old values 0. Unchanged; within 0.2; beyond it towards the return, so (0.2 - 1)^2 without gradient; a tool's token;
    # beyond it and away from the return.
    LossExample(
        samples=(
            ExampleSample(
                mask=(1, 1, 1, 0, 1),
                values=(0.0, 0.1, 0.5, 4.0, -0.5),
                old_values=(0.0, 0.0, 0.0, 0.0, 0.0),
                returns=(1.0, 1.0, 1.0, 9.0, 1.0),
            ),
        ),
        values=((1.0, 0.81, 0.64, 0.0, 2.25),),
        gradient=((-2.0, -1.8, 0.0, 0.0, -3.0),),
    ),
    # Without a clip: the squared error.
    LossExample(
        options={"value_clip": None},
        samples=(ExampleSample(mask=(1, 1), values=(0.5, -1.0), old_values=(0.0, 0.0), returns=(1.0, 1.0)),),
        values=((0.25, 4.0),),
        gradient=((-1.0, -4.0),),
    ),
)

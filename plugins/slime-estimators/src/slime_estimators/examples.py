"""Anchors for the contract kit: inputs of the corrections, with results worked out by hand. The engine's log-probs are the
trainer's minus the logarithm of a round ratio."""

from __future__ import annotations

from slime_core.contracts.example import CorrectionExample, ExampleSample

# Ratios 8, 1.25, a tool token and 0.25; then 2.5. The tool's log-probs differ much, and must not be used.
_TOKENS = (
    ExampleSample(
        mask=(1, 1, 0, 1),
        log_probs=(-2.0, -2.0, -9.0, -2.0),
        old_log_probs=(-2.0, -2.0, -9.0, -2.0),
        rollout_log_probs=(-4.079441542, -2.223143551, 0.0, -0.613705639),
        advantages=(1.0, 1.0, 1.0, 1.0),
    ),
    ExampleSample(
        mask=(1,),
        log_probs=(-1.0,),
        old_log_probs=(-1.0,),
        rollout_log_probs=(-1.916290732,),
        advantages=(-1.0,),
    ),
)

TIS = (
    CorrectionExample(samples=_TOKENS, weights=((2.0, 1.25, 0.0, 0.25), (2.0,))),
    CorrectionExample(
        options={"tis_clip": 3.0, "tis_clip_low": 0.5}, samples=_TOKENS, weights=((3.0, 1.25, 0.0, 0.5), (2.5,))
    ),
)

ICEPOP = (
    CorrectionExample(samples=_TOKENS, weights=((0.0, 1.25, 0.0, 0.0), (2.5,))),
    CorrectionExample(
        options={"tis_clip": 2.0, "tis_clip_low": 0.0}, samples=_TOKENS, weights=((0.0, 1.25, 0.0, 0.25), (0.0,))
    ),
)

# Ratios 4 and 0.5 in one sample, whose product is 2 and whose geometric mean is sqrt 2; then 1; then e^-10, below 1e-4.
_SAMPLES = (
    ExampleSample(
        mask=(1, 0, 1), old_log_probs=(-3.0, -9.0, -3.0), rollout_log_probs=(-4.386294361, 0.0, -2.306852819)
    ),
    ExampleSample(mask=(1,), old_log_probs=(-1.5,), rollout_log_probs=(-1.5,)),
    ExampleSample(mask=(1, 1), old_log_probs=(-11.0, -1.0), rollout_log_probs=(-1.0, -1.0)),
)

MIS = (
    # The third sample is vetoed everywhere but in the last example.
    CorrectionExample(samples=_SAMPLES, weights=((2.0, 0.0, 0.5), (1.0,), (0.0, 0.0))),
    CorrectionExample(
        options={"tis_mode": "clip", "tis_lower_bound": 0.8, "tis_upper_bound": 3.0},
        samples=_SAMPLES,
        weights=((3.0, 0.0, 0.8), (1.0,), (0.0, 0.0)),
    ),
    CorrectionExample(
        options={"tis_level": "sequence", "tis_upper_bound": 1.9},
        samples=_SAMPLES,
        weights=((1.9, 0.0, 1.9), (1.0,), (0.0, 0.0)),
    ),
    CorrectionExample(
        options={"tis_level": "geometric", "tis_mode": "mask", "tis_upper_bound": 1.4},
        samples=_SAMPLES,
        weights=((0.0, 0.0, 0.0), (1.0,), (0.0, 0.0)),
    ),
    # Of the two samples' geometric means, sqrt 2 and 1, the mean is 1.207106781.
    CorrectionExample(
        options={"tis_level": "geometric", "tis_batch_normalize": True},
        samples=_SAMPLES[:2],
        weights=((1.171572875, 0.0, 1.171572875), (0.828427125,)),
    ),
    CorrectionExample(
        options={"use_tis": False, "use_rs": True, "rs_lower_bound": 0.6, "rs_veto_threshold": 0.0},
        samples=_SAMPLES,
        weights=((0.0, 0.0, 0.0), (1.0,), (0.0, 1.0)),
    ),
)

# The first sample's trained tokens have become less likely by 0.3 and 0.1 nats, 0.2 in the mean; the second's, with a
# good response, by 0.5; the third's more likely.
_MOVED = (
    ExampleSample(
        mask=(1, 0, 1), log_probs=(-1.3, -1.0, -1.1), old_log_probs=(-1.0, -9.0, -1.0), advantages=(-1.0, -1.0, -1.0)
    ),
    ExampleSample(mask=(1,), log_probs=(-1.5,), old_log_probs=(-1.0,), advantages=(1.0,)),
    ExampleSample(mask=(1,), log_probs=(-0.9,), old_log_probs=(-1.0,), advantages=(-1.0,)),
)

OPSM = (
    CorrectionExample(samples=_MOVED, weights=((0.0, 0.0, 0.0), (1.0,), (1.0,))),
    CorrectionExample(options={"opsm_delta": 0.25}, samples=_MOVED, weights=((1.0, 0.0, 1.0), (1.0,), (1.0,))),
)

"""Properties of algorithms and their parts: losses, advantages, shapers, KL estimators, corrections."""

from __future__ import annotations

from typing import Final

from slime_core import groups
from slime_core.contracts.advantage import ShapingDriver
from slime_plugin_kit.case import Case
from slime_plugin_kit.kind import Kind, prop, registered_in

ANCHORED: Final = prop(
    "anchored_by_hand", "it has examples that were worked out by hand, and gives their numbers", once=True
)
INPUTS: Final = prop(
    "inputs_are_left_alone", "it changes none of its inputs, and gives the same bits when called twice"
)
UNDECLARED: Final = prop(
    "undeclared_inputs_are_not_needed", "with only the columns that it declares in `needs` it gives the same result"
)
READ: Final = prop("declared_needs_are_read", "each column that it declares in `needs` changes its result", once=True)
ORDER: Final = prop(
    "packing_and_order_change_nothing", "neither the order nor the packing of samples changes a token's value"
)
MICRO: Final = prop(
    "micro_batches_change_nothing", "other micro-batches of a step change neither loss, gradient nor metrics"
)
DATA_PARALLEL: Final = prop(
    "data_parallel_shards_change_nothing", "the shards of data-parallel ranks add up to the whole step"
)
CONTEXT_PARALLEL: Final = prop(
    "context_parallel_shards_change_nothing", "sequences cut over context-parallel ranks add up to the whole step"
)
MASKED: Final = prop(
    "masked_tokens_change_nothing", "values at masked tokens, NaN and infinity included, change nothing"
)
ALL_MASKED: Final = prop(
    "a_fully_masked_batch_gives_zero_with_a_graph",
    "a batch without trained tokens gives a loss of 0 with a graph, and gradients of 0",
)
DIFFERENCES: Final = prop(
    "gradient_equals_finite_differences",
    "its gradient equals finite differences of its value, and is not zero everywhere",
)
FLOAT32: Final = prop("float32_agrees_with_float64", "results in float32 and float64 differ only by rounding")


def uses_advantages(case: Case) -> bool:
    """A critic's loss follows the returns."""
    return bool(case.driver.uses_advantages and not case.driver.trains_values)


LOSSES: Final = Kind(
    name="losses",
    holds=registered_in(groups.LOSSES),
    properties=(
        ANCHORED,
        DIFFERENCES,
        FLOAT32,
        ORDER,
        MICRO,
        DATA_PARALLEL,
        CONTEXT_PARALLEL,
        MASKED,
        ALL_MASKED,
        prop(
            "an_empty_micro_batch_gives_zero_with_a_graph",
            "a rank without tokens joins every reduction, and gives a loss of 0 with a graph",
        ),
        prop(
            "zero_advantages_give_zero_gradient",
            "advantages of 0 give a gradient of exactly 0",
            applies=lambda case: uses_advantages(case) and not case.driver.regularized,
        ),
        UNDECLARED,
        READ,
        prop("extreme_log_ratios_stay_finite", "log-ratios of ten thousand give finite losses and gradients"),
        prop("metrics_are_per_token_and_detached", "losses and metrics have one number per token; metrics no gradient"),
        INPUTS,
    ),
)


def compares_group(case: Case) -> bool:
    estimators = case.algo.estimators
    return bool(estimators) and all(part.driver.compares_group(part.config) for part in estimators)


def actor_uses_advantages(case: Case) -> bool:
    return bool(case.algo.loss.driver.uses_advantages)


def current_may_be_old(case: Case) -> bool:
    return case.algo.old_is_current(steps_per_rollout=1)


ALGORITHMS: Final = Kind(
    name="algorithms",
    holds=registered_in(groups.ALGORITHMS),
    properties=(
        prop("every_option_has_an_owner", "each option of the recipe belongs to one of its parts, or to the kernel"),
        prop(
            "aggregation_is_anchored_by_hand",
            "its aggregation gives tokens the weights worked out by hand",
        ),
        prop(
            "loss_is_the_weighted_sum_of_its_parts",
            "its loss is the sum over tokens of weight x (correction x loss - entropy + KL)",
        ),
        DIFFERENCES,
        FLOAT32,
        ORDER,
        MICRO,
        DATA_PARALLEL,
        CONTEXT_PARALLEL,
        MASKED,
        ALL_MASKED,
        prop(
            "zero_advantages_give_zero_gradient",
            "advantages of 0 give a policy gradient of exactly 0",
            applies=actor_uses_advantages,
        ),
        prop(
            "equal_rewards_give_zero_gradient",
            "where all responses of a prompt get the same reward, the gradient is 0",
            applies=compares_group,
        ),
        UNDECLARED,
        prop(
            "old_log_probs_may_be_the_current_ones",
            "with one step per rollout, the current log-probs can replace the old ones",
            applies=current_may_be_old,
        ),
    ),
)


def uses_kl_penalty(case: Case) -> bool:
    return bool(case.driver.accepts_kl_penalty)


def its_config_compares(case: Case) -> bool:
    return bool(case.driver.compares_group(case.config))


ODD: Final = prop(
    "odd_samples_are_harmless", "an empty response, a fully masked sample and a group of one give finite numbers"
)

ADVANTAGES: Final = Kind(
    name="advantages",
    holds=registered_in(groups.ADVANTAGES, but_not=ShapingDriver),
    properties=(
        ANCHORED,
        prop(
            "equal_rewards_give_zero",
            "where all responses that are compared get the same reward, every advantage is exactly 0",
            applies=its_config_compares,
        ),
        prop(
            "comparing_is_declared",
            "if equal rewards give advantages of 0, it compares the responses of a prompt: compares_group returns True",
            applies=lambda case: not its_config_compares(case),
        ),
        MASKED,
        prop(
            "masked_tokens_are_skipped",
            "tokens of tools cost no discount, get no reward and count in no mean: without them the result is the same",
        ),
        ORDER,
        ODD,
        UNDECLARED,
        READ,
        prop(
            "the_kl_penalty_counts",
            "a KL penalty at a token lowers its advantage, and a penalty of 0 changes nothing",
            applies=uses_kl_penalty,
        ),
        INPUTS,
    ),
)

SHAPING: Final = Kind(
    name="shaping",
    holds=registered_in(groups.ADVANTAGES, as_a=ShapingDriver),
    properties=(
        prop("examples_are_met", "its examples give the results that they declare", once=True),
        prop("missing_rewards_stay_missing", "NaN, which means no reward, stays NaN, and no other value becomes NaN"),
        ORDER,
        INPUTS,
    ),
)


def never_negative(case: Case) -> bool:
    return bool(case.driver.never_negative)


KL: Final = Kind(
    name="kl",
    holds=registered_in(groups.KL),
    properties=(
        ANCHORED,
        prop("zero_at_equality", "if policy and reference agree, it is exactly 0"),
        prop(
            "positive_on_average", "its average over samples of the policy is positive if policy and reference differ"
        ),
        prop("never_negative", "its driver declares never_negative, and no value is negative", applies=never_negative),
        DIFFERENCES,
        FLOAT32,
        prop(
            "the_ratio_makes_it_exact_off_policy",
            "with the ratio, its average over samples of an older policy equals that over the policy's own, gradient included",
        ),
        prop("extreme_log_probs_stay_finite", "gaps of ten thousand nats give finite values and gradients"),
        prop("tokens_are_independent", "it returns the shape of its inputs, and no token changes another's value"),
        INPUTS,
    ),
)


def in_loss(case: Case) -> bool:
    return bool(case.driver.in_loss)


CORRECTIONS: Final = Kind(
    name="corrections",
    holds=registered_in(groups.CORRECTIONS),
    properties=(
        ANCHORED,
        prop("weights_are_detached_and_finite", "weights are finite, not negative, one per token, without gradient"),
        prop("one_where_there_is_no_gap", "where trainer and engine, old and current policy agree, all weights are 1"),
        MASKED,
        ORDER,
        prop(MICRO.name, MICRO.description, applies=in_loss),
        prop(CONTEXT_PARALLEL.name, CONTEXT_PARALLEL.description, applies=in_loss),
        ODD,
        prop("extreme_log_ratios_stay_finite", "log-ratios of ten thousand give finite weights"),
        UNDECLARED,
        READ,
        INPUTS,
    ),
)

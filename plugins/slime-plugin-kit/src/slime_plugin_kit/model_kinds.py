"""Properties of what holds a model: backends and engines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from slime_core import groups
from slime_core.contracts.engine import Capability
from slime_core.contracts.needs import Need
from slime_plugin_kit.algorithm_kinds import MICRO
from slime_plugin_kit.case import Case
from slime_plugin_kit.kind import Kind, Property, prop, registered_in


def on_one_rank(case: Case) -> bool:
    return bool(case.driver.least_ranks(case.config) == 1)


def has_critic(case: Case) -> bool:
    return Need.VALUES in case.driver.provides and on_one_rank(case)


def stages(case: Case) -> bool:
    return bool(case.driver.stages) and on_one_rank(case)


def alone(name: str, says: str) -> Property:
    """What needs no second rank."""
    return prop(name, says, applies=on_one_rank)


BACKENDS: Final = Kind(
    name="backends",
    holds=registered_in(groups.BACKENDS),
    properties=(
        alone("log_probs_equal_those_of_transformers", "log-probs and entropies are those of transformers"),
        alone("gradients_equal_those_of_transformers", "a step's gradient, and its norm, are those of transformers"),
        alone(MICRO.name, MICRO.says),
        alone("a_step_repeats_to_the_bit", "the same step from a new start changes the same bits"),
        prop("any_layout_trains_as_one_rank", "several ranks together give the log-probs and the gradient of one"),
        alone("saved_and_loaded_it_goes_on_to_the_bit", "N steps, save, load and N steps are 2N steps, to the bit"),
        prop(
            "what_is_staged_is_of_that_instant",
            "a checkpoint that is staged, and written after more steps, goes on to the bit",
            applies=stages,
        ),
        alone("an_incomplete_checkpoint_is_refused", "a checkpoint that is missing or cut short is a CheckpointError"),
        alone(
            "export_equals_what_transformers_loads", "exported tensors are those of the saved folder, under its names"
        ),
        alone(
            "a_step_that_is_not_finite_changes_nothing", "NaN in a loss is reported, and moves no weight or schedule"
        ),
        alone("copies_stay_frozen", "a frozen copy keeps its weights until it is refreshed"),
        alone("sleep_loses_nothing", "after sleep and wake it goes on as if it had not slept"),
        prop("layouts_cover_the_ranks", "the layout is pure, and each part of the tokens is reported once"),
        prop("a_critic_learns", "with a value head, its squared error falls", applies=has_critic),
    ),
)


def offers(capability: Capability) -> Callable[[Case], bool]:
    return lambda case: capability in case.driver.may_offer


ENGINES: Final = Kind(
    name="engines",
    holds=registered_in(groups.ENGINES),
    properties=(
        prop("log_probs_equal_those_of_transformers", "the log-prob of each sampled token is that of transformers"),
        prop("temperature_zero_takes_the_likeliest_token", "greedy answers are those of transformers, up to ties"),
        prop("answers_come_in_the_order_of_requests", "each request is answered, in order, within its budget"),
        prop("its_stream_has_every_answer_once", "streamed answers are those that generate gives"),
        prop(
            "the_seed_decides_the_tokens",
            "the same requests together give the same bits, another seed others",
            applies=offers(Capability.DETERMINISTIC),
        ),
        prop(
            "company_changes_no_draw",
            "a request has the same tokens, whatever is sampled beside it and however",
            applies=offers(Capability.DETERMINISTIC),
        ),
        prop("an_answer_ends_where_it_should", "stop tokens end an answer and stay in it; the budget is the other end"),
        prop("stop_strings_end_an_answer", "text that ends with a stop string ends there"),
        prop("an_abort_returns_what_there_is", "an aborted request returns its tokens so far; others go on"),
        prop("an_abort_at_once_does_no_harm", "an abort that comes with the request ends it, and the engine goes on"),
        prop("pause_holds_every_answer", "between pause and resume nothing is answered"),
        prop(
            "new_weights_are_used_under_their_version", "after the last bucket, tokens are the new weights' and say so"
        ),
        prop("a_damaged_bucket_is_refused", "a wrong checksum is an EngineError that changes nothing"),
        prop(
            "spans_tell_versions_apart",
            "where weights change under a request, each span's log-probs are its version's",
            applies=offers(Capability.VERSION_SPANS),
        ),
        prop(
            "sleep_loses_nothing",
            "after sleep and wake it has the same weights and gives the same answers",
            applies=offers(Capability.SLEEP),
        ),
        prop("the_loop_goes_on_meanwhile", "while it decodes, the event loop has its turns"),
        prop("a_stopped_engine_says_so", "what runs when it stops fails, and so does what comes later"),
    ),
)


LAUNCHERS: Final = Kind(
    name="launchers",
    holds=registered_in(groups.LAUNCHERS),
    properties=(
        prop("without_specs_it_starts_nothing", "where there is nothing to start, it starts nothing"),
        prop("it_can_be_stopped_at_any_time", "it can be stopped before anything was started, and twice"),
    ),
)


def tells_moments(case: Case) -> bool:
    return case.driver.moments is not None


def rounds_state(case: Case) -> bool:
    return bool(case.driver.rounds_state)


OPTIMIZERS: Final = Kind(
    name="optimizers",
    holds=registered_in(groups.OPTIMIZERS),
    properties=(
        prop("a_step_repeats_to_the_bit", "the same steps from a new start change the same bits"),
        prop("the_learning_rate_is_that_of_the_groups", "at a learning rate of 0, set before a step, nothing changes"),
        prop(
            "saved_and_loaded_it_goes_on_to_the_bit", "what its state tells is all that it needs to go on, to the bit"
        ),
        prop("its_moments_are_as_told", "it holds as much as a plan of memory counts", applies=tells_moments),
        prop("bfloat16_stays_bfloat16", "bfloat16 weights and moments move, and stay bfloat16", applies=rounds_state),
    ),
)

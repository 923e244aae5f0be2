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
    return bool(case.driver.min_world_size(case.config) == 1)


def has_critic(case: Case) -> bool:
    return Need.VALUES in case.driver.provides and on_one_rank(case)


def supports_async_save(case: Case) -> bool:
    return bool(case.driver.supports_async_save) and on_one_rank(case)


def alone(name: str, description: str) -> Property:
    """A property that is tested on one rank."""
    return prop(name, description, applies=on_one_rank)


BACKENDS: Final = Kind(
    name="backends",
    holds=registered_in(groups.BACKENDS),
    properties=(
        alone("log_probs_equal_those_of_transformers", "log-probs and entropies are those of transformers"),
        alone("gradients_equal_those_of_transformers", "a step's gradient, and its norm, are those of transformers"),
        alone(MICRO.name, MICRO.description),
        alone("a_step_repeats_to_the_bit", "the same step from a new start changes the same bits"),
        prop("any_layout_trains_as_one_rank", "several ranks give the log-probs and the gradient of one rank"),
        alone("saved_and_loaded_it_continues_to_the_bit", "N steps, save, load and N steps equal 2N steps, to the bit"),
        prop(
            "what_is_staged_is_of_that_instant",
            "a checkpoint that is staged, and written after more steps, continues to the bit",
            applies=supports_async_save,
        ),
        alone("an_incomplete_checkpoint_is_refused", "a checkpoint that is missing or cut short is a CheckpointError"),
        alone(
            "export_equals_what_transformers_loads", "exported tensors are those of the saved folder, under its names"
        ),
        alone(
            "a_step_that_is_not_finite_changes_nothing",
            "a loss of NaN is reported, and changes no weight and no schedule",
        ),
        alone(
            "a_micro_batch_without_memory_changes_nothing",
            "a micro-batch that does not fit into memory is named, and the step leaves nothing",
        ),
        alone(
            "gradients_add_up_until_the_optimizer_steps",
            "a step after several calls of forward_backward is that of one call with all their micro-batches",
        ),
        alone(
            "the_settings_of_a_step_are_those_of_its_call",
            "optim_step takes the lr of its call, and the step after it the schedule's; so the others in `step_settings`",
        ),
        alone("weights_that_overflow_are_reported", "a step that leaves weights that are not finite is reported"),
        alone("copies_stay_frozen", "a frozen model keeps its weights until it is updated"),
        alone("sleep_loses_nothing", "after sleep and wake_up it continues as without them"),
        prop(
            "layouts_cover_the_ranks",
            "the layout is a pure function, and each part of the tokens is reported by one rank",
        ),
        prop("a_critic_learns", "with a value head, its squared error falls", applies=has_critic),
    ),
)


def offers(capability: Capability) -> Callable[[Case], bool]:
    return lambda case: capability in case.driver.optional_capabilities


ENGINES: Final = Kind(
    name="engines",
    holds=registered_in(groups.ENGINES),
    properties=(
        prop("log_probs_equal_those_of_transformers", "the log-prob of each sampled token is that of transformers"),
        prop(
            "temperature_zero_takes_the_likeliest_token", "greedy responses are those of transformers, except for ties"
        ),
        prop("responses_come_in_the_order_of_requests", "each request gets a response, in order, within its budget"),
        prop("a_structural_tag_is_respected_or_refused", "without guided decoding, it raises EngineRefused"),
        prop("its_stream_has_every_response_once", "streamed responses equal those of generate"),
        prop(
            "the_seed_decides_the_tokens",
            "the same batch of requests gives the same bits, and another seed other tokens",
            applies=offers(Capability.DETERMINISTIC),
        ),
        prop(
            "company_changes_no_draw",
            "a request has the same tokens, with any other requests beside it and any of their sampling",
            applies=offers(Capability.DETERMINISTIC),
        ),
        prop(
            "a_response_ends_where_it_should", "a response ends with a stop token, which stays in it, or at its budget"
        ),
        prop("stop_strings_end_a_response", "a response ends where its text ends with a stop string"),
        prop("an_abort_returns_what_there_is", "an aborted request returns its tokens so far; others continue"),
        prop(
            "an_abort_at_once_does_no_harm",
            "an abort that comes with the request ends it, and the engine serves others",
        ),
        prop("pause_holds_every_response", "between pause and resume no response is returned"),
        prop(
            "new_weights_are_used_under_their_version",
            "after the last bucket, tokens are the new weights', with the new version",
        ),
        prop(
            "its_checksum_is_that_of_the_weights",
            "its checksum over all weights is that of the exported ones",
            applies=offers(Capability.CHECKSUM),
        ),
        prop("a_damaged_bucket_is_refused", "a wrong checksum is an EngineError, and changes nothing"),
        prop(
            "spans_separate_versions",
            "if weights change during a request, the log-probs of each span are those of its version",
            applies=offers(Capability.VERSION_SPANS),
        ),
        prop(
            "sleep_loses_nothing",
            "after sleep and wake_up it has the same weights and gives the same responses",
            applies=offers(Capability.SLEEP),
        ),
        prop("the_loop_continues_meanwhile", "while it decodes, the event loop is not blocked"),
        prop("a_stopped_engine_fails_its_requests", "requests that run when it stops fail, and so do later ones"),
    ),
)


LAUNCHERS: Final = Kind(
    name="launchers",
    holds=registered_in(groups.LAUNCHERS),
    properties=(
        prop("without_specs_it_starts_nothing", "without specs it starts nothing"),
        prop("it_can_be_stopped_at_any_time", "it can be stopped before anything was started, and twice"),
    ),
)


def declares_moments(case: Case) -> bool:
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
            "saved_and_loaded_it_continues_to_the_bit",
            "its state has all that it needs to continue, to the bit",
        ),
        prop(
            "its_moments_are_as_declared",
            "its state holds as many moments as its driver declares in `moments`",
            applies=declares_moments,
        ),
        prop("bfloat16_stays_bfloat16", "bfloat16 weights and moments change, and stay bfloat16", applies=rounds_state),
    ),
)

"""Properties of what makes and moves data: filters, rewards, generators, collectors, sources, and what is around them."""

from __future__ import annotations

from typing import Final

from slime_core import groups
from slime_core.contracts.example import SourceExample
from slime_core.contracts.filter import BufferFilterDriver
from slime_plugin_kit.case import Case
from slime_plugin_kit.kind import Kind, Property, prop, registered_in

SAME_TWICE: Final = "a second call, and a new instance, give the same result"

FILTERS: Final = Kind(
    name="filters",
    holds=registered_in(groups.FILTERS, but_not=BufferFilterDriver),
    properties=(
        prop("decides_the_same_twice", SAME_TWICE),
        prop("groups_are_left_alone", "it does not change the group"),
        prop(
            "odd_groups_are_judged",
            "unscored, failed and single samples, empty responses, equal and negative rewards get a decision",
        ),
        prop("a_drop_has_a_reason", "what it drops is counted under a reason that is valid in a metric's name"),
    ),
)

BUFFER_FILTERS: Final = Kind(
    name="buffer_filters",
    holds=registered_in(groups.FILTERS, as_a=BufferFilterDriver),
    properties=(
        prop(
            "chooses_positions_that_are_there",
            "it chooses distinct positions of the buffer, at most as many as requested",
        ),
        prop("chooses_the_same_twice", SAME_TWICE),
        prop("items_are_left_alone", "it does not change the items"),
    ),
)

REWARDS: Final = Kind(
    name="rewards",
    holds=registered_in(groups.REWARDS),
    properties=(
        prop(
            "examples_get_their_rewards",
            "the responses of its examples get the rewards that they declare",
            once=True,
        ),
        prop("every_sample_gets_a_finite_number", "each sample gets one finite number, or the same named ones"),
        prop("order_changes_nothing", "the reward of a response does not depend on its position in the group"),
        prop("scores_the_same_twice", SAME_TWICE),
        prop("an_empty_response_is_scored", "a response without text gets a reward too"),
        prop("groups_are_left_alone", "it does not change the group"),
        prop(
            "scores_the_same_in_a_worker_process", "built from its spec in another process, it gives the same rewards"
        ),
    ),
)


GENERATORS: Final = Kind(
    name="generators",
    holds=registered_in(groups.GENERATORS),
    properties=(
        prop("lengths_agree", "tokens, mask and log-probs have equal lengths and begin after the prompt"),
        prop(
            "trained_tokens_are_the_engines",
            "trained tokens are those that an engine sampled, with its log-probs and version",
        ),
        prop("the_budget_is_kept", "the model generates at most max_new_tokens for the whole response"),
        prop("an_abort_ends_it", "after an abort it ends soon, with a sample of status aborted"),
        prop("engine_errors_surface", "the error of an engine is raised, not returned as a response"),
        prop("episodes_keep_apart", "episodes that run at the same time give the same samples as alone"),
        prop("a_retry_repeats_the_response", "a response that is generated again after a failure is the same"),
        prop("a_partial_rollout_continues", "the kept tokens of a partial response stay as they are"),
        prop(
            "a_response_without_room_is_a_sample", "where the context is full it returns a sample that trains nothing"
        ),
    ),
)


def with_engine(case: Case) -> bool:
    return bool(case.driver.needs_engine(case.config))


def reads_prompts(case: Case) -> bool:
    return bool(case.driver.reads_prompts(case.config))


COLLECTORS: Final = Kind(
    name="collectors",
    holds=registered_in(groups.COLLECTORS),
    properties=(
        prop(
            "a_step_has_the_requested_groups",
            "it returns the requested number of groups and samples, in submission order",
        ),
        prop("collects_the_same_twice", SAME_TWICE),
        prop(
            "its_observer_gets_every_step", "the observer is called once with each step's groups, as they are returned"
        ),
        prop(
            "no_prompt_is_lost_or_used_twice",
            "every prompt that was drawn is in a step, refused, or back in the buffer",
            applies=reads_prompts,
        ),
        prop("refused_groups_are_replaced", "groups that the filters drop are not returned", applies=with_engine),
        prop(
            "the_end_of_the_data_is_an_error",
            "the end of the data raises an error, and no call waits forever",
            applies=reads_prompts,
        ),
    ),
)


def is_seeded(case: Case) -> bool:
    return any(example.seeded for example in case.examples(SourceExample))


def has_epochs(case: Case) -> bool:
    return all(example.epochs for example in case.examples(SourceExample))


def has_other_data(case: Case) -> bool:
    return any(example.other_options is not None for example in case.examples(SourceExample))


SOURCES: Final = Kind(
    name="sources",
    holds=registered_in(groups.SOURCES),
    properties=(
        prop("prompts_are_rendered", "prompts have int32 tokens and an origin"),
        prop("the_same_seed_gives_the_same_draws", "the order depends only on data, options and seed"),
        prop("another_seed_gives_another_order", "the seed decides the order", applies=is_seeded),
        prop("draws_do_not_depend_on_how_many_are_taken", "draws taken one by one and together are the same"),
        prop("draws_are_numbered_for_ever", "group indices count up, also over epochs"),
        prop("an_epoch_has_every_row_once", "between two draws of a row, all others are drawn", applies=has_epochs),
        prop("a_restored_source_continues", "restored from its state, as JSON, it continues with the same draws"),
        prop("the_fingerprint_follows_the_data", "equal data have the same fingerprint, other data another"),
        prop(
            "a_state_of_other_data_is_refused", "restoring a position in other data is an error", applies=has_other_data
        ),
    ),
)

RENDERERS: Final = Kind(
    name="renderers",
    holds=registered_in(groups.RENDERERS),
    properties=(
        prop("a_row_becomes_a_prompt", "a prompt has int32 tokens, and the row's label, metadata and origin"),
        prop("renders_the_same_twice", SAME_TWICE),
        prop(
            "a_missing_key_is_an_error", "a row without its input or label raises a DataError that begins with the row"
        ),
        prop(
            "long_prompts_are_refused",
            "`accepts` follows max_prompt_len, and leaves a token of the context for the response; `limit` names which",
        ),
    ),
)

MEDIA: Final = Kind(
    name="media",
    holds=registered_in(groups.MEDIA),
    properties=(
        prop("it_declares_an_engine_capability", "its `needs` is a Capability"),
        prop(
            "an_image_has_its_places",
            "an image has one token at its places for each of its features, all with the same id",
        ),
        prop(
            "pixels_fit_the_tokens", "packed, each feature has exactly one of these tokens, and no other token has one"
        ),
        prop("rows_without_media_are_text", "a row without media has the same tokens as in a text run"),
        prop("renders_the_same_twice", SAME_TWICE),
        prop("damaged_media_are_an_error", "media that cannot be decoded raise a DataError that begins with the row"),
    ),
)

MIDDLEWARES: Final = Kind(
    name="middlewares",
    holds=registered_in(groups.MIDDLEWARES),
    properties=(
        prop("requests_and_completions_pass_through", "requests and completions are not changed on the way"),
        prop("errors_surface", "the error of an engine reaches the caller, and the next request is served"),
        prop("requests_keep_apart", "requests at the same time get their own responses"),
        prop("a_cancelled_request_ends", "a request whose caller goes away ends, and the next one is served"),
        prop("counters_are_numbers", "its metrics can be written as JSON"),
    ),
)

TRACKERS: Final = Kind(
    name="trackers",
    holds=registered_in(groups.TRACKERS),
    properties=(
        prop("it_logs_and_closes", "a run is logged on every axis, and afterwards no file or thread is left"),
        prop("a_run_without_steps_is_closed_too", "a run that ends before its first step is closed as well"),
        prop("metrics_are_left_alone", "it does not change the metrics, which other trackers get too"),
        prop(
            "numbers_that_are_not_finite_are_accepted",
            "NaN and infinity, and a step without metrics, do not stop a run",
        ),
        prop("a_resumed_run_continues", "a second and third attempt start where the checkpoint was"),
        prop("other_files_are_left_alone", "other files in the run's folder are unchanged"),
    ),
)


def sent(name: str, description: str) -> Property:
    """Not for transports that send nothing."""
    return prop(name, description, applies=lambda case: not case.driver.sends_nothing)


TRANSPORTS: Final = Kind(
    name="transports",
    holds=registered_in(groups.TRANSPORTS),
    properties=(
        sent("what_arrives_is_what_was_exported", "every engine holds the exported bytes, with their version"),
        sent("its_report_is_true", "it reports the version and the buckets that it has sent"),
        sent("sending_again_changes_nothing", "a version can be sent twice, and another one after it"),
        sent("a_refused_bucket_surfaces", "an engine that refuses a bucket ends the weight update with an EngineError"),
        sent("an_engine_that_stays_behind_is_an_error", "an engine that lacks the version afterwards is an error"),
        sent("no_weights_are_an_error", "an export without a bucket is an error, not a weight update"),
    ),
)

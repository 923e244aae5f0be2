"""Properties of what makes and moves data: filters, rewards, generators, collectors, sources, and what is around them."""

from __future__ import annotations

from typing import Final

from slime_core import groups
from slime_core.contracts.example import SourceExample
from slime_core.contracts.filter import BufferFilterDriver
from slime_plugin_kit.case import Case
from slime_plugin_kit.kind import Kind, prop, registered_in

SAME_TWICE: Final = "a second time, and from a new instance, it is the same"

FILTERS: Final = Kind(
    name="filters",
    holds=registered_in(groups.FILTERS, but_not=BufferFilterDriver),
    properties=(
        prop("decides_the_same_twice", SAME_TWICE),
        prop("groups_are_left_alone", "it changes nothing in the group that it judges"),
        prop(
            "odd_groups_are_judged",
            "unscored, failed and single samples, empty responses, equal and negative rewards get a decision",
        ),
        prop("a_drop_has_a_reason", "what it drops is counted under a reason that can stand in a metric's name"),
    ),
)

BUFFER_FILTERS: Final = Kind(
    name="buffer_filters",
    holds=registered_in(groups.FILTERS, as_a=BufferFilterDriver),
    properties=(
        prop("chooses_positions_that_are_there", "it chooses different positions of the buffer, and not too many"),
        prop("chooses_the_same_twice", SAME_TWICE),
        prop("items_are_left_alone", "it changes nothing in the items that it chooses from"),
    ),
)

REWARDS: Final = Kind(
    name="rewards",
    holds=registered_in(groups.REWARDS),
    properties=(
        prop("examples_earn_what_they_should", "the answers of its examples earn what they say", once=True),
        prop("every_sample_gets_a_finite_number", "each sample gets one finite number, or the same named ones"),
        prop("order_changes_nothing", "what an answer earns does not depend on where it stands in its group"),
        prop("scores_the_same_twice", SAME_TWICE),
        prop("an_empty_response_is_scored", "an answer without text gets a number as well"),
        prop("groups_are_left_alone", "it changes nothing in the group that it scores"),
        prop("scores_the_same_in_a_worker_process", "built from its spec in another process it gives the same numbers"),
    ),
)


GENERATORS: Final = Kind(
    name="generators",
    holds=registered_in(groups.GENERATORS),
    properties=(
        prop("lengths_agree", "tokens, mask and log-probs have equal lengths and begin after the prompt"),
        prop(
            "trained_tokens_are_the_engines",
            "what is trained is what an engine sampled, with its log-probs and version",
        ),
        prop("the_budget_is_kept", "the model writes no more tokens than the sampling allows for the whole response"),
        prop("an_abort_ends_it", "after an abort it ends soon, with a sample that says aborted"),
        prop("engine_errors_surface", "an engine that dies is not taken for an answer"),
        prop("episodes_keep_apart", "many episodes at once give what each gives alone"),
        prop("a_retry_repeats_the_answer", "generated again, after a failure, an answer is the same"),
        prop("a_partial_rollout_goes_on", "what was kept of an answer that was broken off stays as it is"),
        prop("an_answer_without_room_is_a_sample", "where the context is full it returns a sample that trains nothing"),
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
        prop("a_step_has_the_groups_that_were_asked_for", "as many groups of as many samples, in submission order"),
        prop("collects_the_same_twice", SAME_TWICE),
        prop("its_observer_hears_of_every_step", "each step's groups are told, once and as they are returned"),
        prop(
            "no_prompt_is_lost_or_used_twice",
            "every prompt that was drawn is in a step, refused, or back in the buffer",
            applies=reads_prompts,
        ),
        prop("refused_groups_are_replaced", "what the filters drop does not come through", applies=with_engine),
        prop(
            "the_end_of_the_data_is_told",
            "a source that has ended is an error, not an endless wait",
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
        prop("prompts_are_rendered", "prompts have int32 tokens and say where they come from"),
        prop("the_same_seed_gives_the_same_draws", "the order follows from data, options and seed alone"),
        prop("another_seed_gives_another_order", "the seed decides the order", applies=is_seeded),
        prop("draws_do_not_depend_on_how_many_are_taken", "taken one by one or together, draws are the same"),
        prop("draws_are_numbered_for_ever", "group indices count up, over epochs too"),
        prop("an_epoch_has_every_row_once", "between two draws of a row, all others are drawn", applies=has_epochs),
        prop("a_restored_source_goes_on", "restored from its state, as JSON, it goes on with the same draws"),
        prop("the_fingerprint_follows_the_data", "it is the same for the same data, and another for others"),
        prop("a_state_of_other_data_is_refused", "a position in other data is an error", applies=has_other_data),
    ),
)

MEDIA: Final = Kind(
    name="media",
    holds=registered_in(groups.MEDIA),
    properties=(
        prop("it_says_what_engines_must_offer", "its `needs` is a Capability"),
        prop("an_image_has_its_places", "as many equal tokens stand at an image's places as it has features"),
        prop("pixels_fit_the_tokens", "packed, these tokens stand for the features, each once, and no others do"),
        prop("rows_without_media_are_text", "a row without any has the tokens that it has in a run of text"),
        prop("renders_the_same_twice", SAME_TWICE),
        prop("damaged_media_are_told", "what cannot be decoded is a DataError that begins with the row"),
    ),
)

MIDDLEWARES: Final = Kind(
    name="middlewares",
    holds=registered_in(groups.MIDDLEWARES),
    properties=(
        prop("requests_and_completions_pass_through", "what is asked and what is answered is not changed on the way"),
        prop("errors_surface", "what the engine raises reaches the caller, and the next request is served"),
        prop("requests_keep_apart", "many requests at once get their own answers"),
        prop("a_cancelled_request_ends", "whose caller goes away ends, and the next one is served"),
        prop("counters_are_numbers", "its metrics can be written as JSON"),
    ),
)

TRACKERS: Final = Kind(
    name="trackers",
    holds=registered_in(groups.TRACKERS),
    properties=(
        prop("it_logs_and_closes", "a run is logged on every axis, and afterwards no file or thread is left"),
        prop("a_run_without_a_word_is_closed_too", "a run that ends before its first step is finished as well"),
        prop("metrics_are_left_alone", "it changes nothing in the metrics that others get too"),
        prop(
            "numbers_that_are_not_finite_are_taken", "NaN and infinity, and a step without metrics, do not stop a run"
        ),
        prop("a_resumed_run_goes_on", "a second and third attempt start where the checkpoint was"),
        prop("other_files_are_left_alone", "what is not its own in the run's folder stays as it is"),
    ),
)

TRANSPORTS: Final = Kind(
    name="transports",
    holds=registered_in(groups.TRANSPORTS),
    properties=(
        prop("what_arrives_is_what_was_exported", "every engine holds the exporter's bytes, under its version"),
        prop("its_report_is_true", "it reports the version and the buckets that it has sent"),
        prop("pushing_again_changes_nothing", "a version can be pushed twice, and another one after it"),
        prop("a_refused_bucket_surfaces", "an engine that refuses a bucket ends the push with an EngineError"),
        prop("an_engine_that_stays_behind_is_an_error", "an engine without the version is not passed over"),
        prop("no_weights_are_an_error", "an export without a bucket is not taken for a publish"),
    ),
)

"""Which properties each kind of plugin must have. The list is checked against what has run: a case that was lost, left
out or skipped is a failure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from slime_core import groups
from slime_core.contracts.advantage import ShapingDriver
from slime_core.contracts.engine import Capability
from slime_core.contracts.example import SourceExample
from slime_core.contracts.filter import BufferFilterDriver
from slime_core.contracts.needs import Need
from slime_core.testing.case import Case, Subject


def always(case: Case) -> bool:
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Property:
    """`name` is that of its test without `test_`; `says` completes "PLUGIN breaks its contract: "."""

    name: str
    says: str
    once: bool = False
    """One case for the entry point, not one for each set of options."""
    applies: Callable[[Case], bool] = always


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """`name` is that of the module of its tests."""

    name: str
    holds: Callable[[Subject], bool]
    properties: tuple[Property, ...]


def registered_in(group: str, *, as_a: type | None = None, but_not: type | None = None) -> Callable[[Subject], bool]:
    """Whether a subject is of this group, and a driver of this class where the group holds two."""

    def holds(subject: Subject) -> bool:
        if subject.entry.group != group or subject.resolved is None:
            return False
        loaded: Any = subject.resolved.loaded
        if as_a is not None and not issubclass(loaded, as_a):
            return False
        return but_not is None or not issubclass(loaded, but_not)

    return holds


def prop(name: str, says: str, *, once: bool = False, applies: Callable[[Case], bool] = always) -> Property:
    return Property(name=name, says=says, once=once, applies=applies)


# --- What holds for everything ----------------------------------------------------------------------------------------


def is_part(case: Case) -> bool:
    return case.entry.group in groups.DRIVER_GROUPS


def is_driver(case: Case) -> bool:
    return is_part(case) and not case.subject.is_recipe


ENTRIES: Final = Kind(
    name="entries",
    holds=lambda subject: True,
    properties=(
        prop(
            "it_keeps_its_contract",
            "it resolves, its module imports nothing heavy, its options are documented, strict and frozen, and its "
            "distribution says which slime-core it needs",
            once=True,
        ),
        prop(
            "it_has_options_to_try",
            "its defaults, or the options of its examples, can be bound",
            once=True,
            applies=is_part,
        ),
        prop("options_travel_to_workers", "a worker that gets its spec as JSON builds the same", applies=is_driver),
        prop(
            "unknown_options_are_refused", "an option that it does not have is an error", once=True, applies=is_driver
        ),
    ),
)

# --- Algorithms and their parts ---------------------------------------------------------------------------------------

ANCHORED: Final = prop(
    "anchored_by_hand", "it gives the numbers that were worked out by hand, and there are some", once=True
)
INPUTS: Final = prop("inputs_are_left_alone", "it changes none of its inputs, and gives the same bits when asked twice")
UNDECLARED: Final = prop(
    "undeclared_inputs_are_not_needed", "it computes the same when it gets only what it declares in `needs`"
)
READ: Final = prop(
    "declared_needs_are_read", "what it declares in `needs` has an effect, so it is not computed in vain", once=True
)
ORDER: Final = prop(
    "packing_and_order_change_nothing", "neither the order of samples nor how they are packed changes a token's number"
)
MICRO: Final = prop(
    "micro_batches_change_nothing", "how a step is cut into micro-batches changes neither loss, gradient nor metrics"
)
DATA_PARALLEL: Final = prop(
    "data_parallel_shards_change_nothing", "the shards of data-parallel ranks add up to the whole step"
)
CONTEXT_PARALLEL: Final = prop(
    "context_parallel_shards_change_nothing", "sequences cut over context-parallel ranks add up to the whole step"
)
MASKED: Final = prop(
    "masked_tokens_change_nothing", "what stands at masked tokens, NaN and infinity included, changes nothing"
)
DIFFERENCES: Final = prop(
    "gradient_equals_finite_differences", "its gradient is that of its value, and not zero everywhere"
)
FLOAT32: Final = prop("float32_agrees_with_float64", "it loses no more than rounding in float32")


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
        prop(
            "a_fully_masked_batch_gives_zero_with_a_graph",
            "nothing to train gives a loss of 0 that can still be differentiated, to zeros",
        ),
        prop(
            "an_empty_micro_batch_gives_zero_with_a_graph",
            "a rank without tokens takes part in every reduction and gives a loss of 0 with a graph",
        ),
        prop(
            "zero_advantages_give_zero_gradient",
            "advantages of 0 give a gradient of exactly 0",
            applies=uses_advantages,
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
        prop("every_option_has_an_owner", "each option of the recipe is one of a part of it, or of the kernel"),
        prop(
            "aggregation_is_anchored_by_hand",
            "its aggregation gives tokens the weights that were worked out by hand",
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
        prop(
            "a_fully_masked_batch_gives_zero_with_a_graph",
            "nothing to train gives a loss of 0 that can still be differentiated, to zeros",
        ),
        prop(
            "zero_advantages_give_zero_gradient",
            "advantages of 0 give a policy gradient of exactly 0",
            applies=actor_uses_advantages,
        ),
        prop(
            "equal_rewards_give_zero_gradient",
            "where all answers of a prompt earn the same, nothing is learnt",
            applies=compares_group,
        ),
        UNDECLARED,
        prop(
            "old_log_probs_may_be_the_current_ones",
            "with one step per rollout, the current log-probs do for the old ones",
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
            "where all answers that are compared earn the same, every advantage is exactly 0",
            applies=its_config_compares,
        ),
        MASKED,
        prop(
            "masked_tokens_are_skipped",
            "tokens that a tool wrote cost no discount, take no reward and count in no mean: without them, all is the same",
        ),
        ORDER,
        ODD,
        UNDECLARED,
        READ,
        prop(
            "the_kl_penalty_counts",
            "a KL penalty at a token lowers its advantage, and a penalty of 0 is none",
            applies=uses_kl_penalty,
        ),
        INPUTS,
    ),
)

SHAPING: Final = Kind(
    name="shaping",
    holds=registered_in(groups.ADVANTAGES, as_a=ShapingDriver),
    properties=(
        prop("examples_are_met", "its examples come out as they say", once=True),
        prop("missing_rewards_stay_missing", "NaN, which stands for no reward, stays NaN, and nothing else becomes it"),
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
        prop("zero_at_equality", "where policy and reference agree it is exactly 0"),
        prop("positive_on_average", "over what the policy samples it is positive wherever policy and reference differ"),
        prop("never_negative", "its driver says never_negative, and it is", applies=never_negative),
        DIFFERENCES,
        FLOAT32,
        prop(
            "the_ratio_makes_it_exact_off_policy",
            "with the ratio, its average over an older policy's samples is the one over its own, gradient included",
        ),
        prop("extreme_log_probs_stay_finite", "gaps of ten thousand nats give finite values and gradients"),
        prop("every_token_stands_alone", "any shape goes in and comes out, and no token changes another's number"),
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
        prop(MICRO.name, MICRO.says, applies=in_loss),
        prop(CONTEXT_PARALLEL.name, CONTEXT_PARALLEL.says, applies=in_loss),
        ODD,
        prop("extreme_log_ratios_stay_finite", "log-ratios of ten thousand give finite weights"),
        UNDECLARED,
        READ,
        INPUTS,
    ),
)

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

# --- Data, rollouts and what is around them ---------------------------------------------------------------------------

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

# --- Models -----------------------------------------------------------------------------------------------------------


def on_one_rank(case: Case) -> bool:
    return bool(case.driver.least_ranks(case.config) == 1)


def has_critic(case: Case) -> bool:
    return Need.VALUES in case.driver.provides and on_one_rank(case)


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

KINDS: Final = (
    ENTRIES,
    ALGORITHMS,
    LOSSES,
    ADVANTAGES,
    SHAPING,
    KL,
    CORRECTIONS,
    FILTERS,
    BUFFER_FILTERS,
    REWARDS,
    GENERATORS,
    COLLECTORS,
    SOURCES,
    MIDDLEWARES,
    TRACKERS,
    TRANSPORTS,
    BACKENDS,
    ENGINES,
)

"""Each plugin of acme-faults has one thing wrong: the kit reports that property by name, and no other."""

from __future__ import annotations

import pytest
from kit_run import shipped

from slime_plugin_kit.kinds import KINDS

SPLITS = {
    "micro_batches_change_nothing",
    "data_parallel_shards_change_nothing",
    "context_parallel_shards_change_nothing",
}
EMPTY = {"an_empty_micro_batch_gives_zero_with_a_graph"}

# By kind, then by plugin: the properties that it lacks.
FAULTS: dict[str, dict[str, set[str]]] = {
    "losses": {
        "right": set(),
        "times_mask": {"masked_tokens_change_nothing"},
        "micro_mean": SPLITS,
        "twice": {"anchored_by_hand"},
        "reads_undeclared": {"undeclared_inputs_are_not_needed"},
        "declares_in_vain": {"declared_needs_are_read"},
        "no_anchor": {"anchored_by_hand"},
        "not_clamped": {"extreme_log_ratios_stay_finite"},
        "wrong_backward": {"gradient_equals_finite_differences"},
        "by_position": SPLITS | {"packing_and_order_change_nothing"},
        "stays_nonzero": {"zero_advantages_give_zero_gradient"},
        "no_graph": SPLITS | EMPTY | {"a_fully_masked_batch_gives_zero_with_a_graph"},
        "reduces_sometimes": EMPTY | {"context_parallel_shards_change_nothing"},
        "lively_metric": {"metrics_are_per_token_and_detached"},
        "writes": {"inputs_are_left_alone"},
        "half_precision": {"float32_agrees_with_float64"},
        "loose_options": set(),
        "travels_badly": set(),
        "nothing_to_try": set(),
        "wrong_examples": set(),
        "raising_examples": {"anchored_by_hand"},
    },
    "algorithms": {
        "right_recipe": set(),
        "micro_mean_recipe": SPLITS,
        "reads_undeclared_recipe": {"undeclared_inputs_are_not_needed"},
        "no_graph_recipe": SPLITS | {"a_fully_masked_batch_gives_zero_with_a_graph"},
        "half_precision_recipe": {"float32_agrees_with_float64"},
        "wrong_backward_recipe": {"gradient_equals_finite_differences"},
        "stays_nonzero_recipe": {"zero_advantages_give_zero_gradient", "equal_rewards_give_zero_gradient"},
        "reads_masked_tokens_recipe": {"masked_tokens_change_nothing"},
        "by_neighbour_recipe": {"packing_and_order_change_nothing"},
        "always_learns_recipe": {"equal_rewards_give_zero_gradient"},
        "reads_values_recipe": {"undeclared_inputs_are_not_needed"},
        "no_such_part": set(),
        "no_such_option": {"every_option_has_an_owner"},
    },
    "advantages": {
        "centred": set(),
        "by_neighbour": {"packing_and_order_change_nothing"},
        "always_learns": {"equal_rewards_give_zero"},
        "reads_values": {"undeclared_inputs_are_not_needed"},
        "shares_with_tools": {"masked_tokens_are_skipped"},
        "reads_masked_tokens": {"masked_tokens_are_skipped", "masked_tokens_change_nothing"},
        "declares_values": {"declared_needs_are_read"},
        "hides_its_baseline": {"comparing_is_declared"},
        "twice_the_credit": {"anchored_by_hand"},
        "raises_alone": {"odd_samples_are_harmless"},
        "penalty_turned_round": {"the_kl_penalty_counts"},
        "writes_into_the_batch": {"inputs_are_left_alone"},
    },
    "shaping": {
        "per_token": set(),
        "fills_in": {"missing_rewards_stay_missing"},
        "wrong_price": {"examples_are_met"},
        "by_rank": {"packing_and_order_change_nothing"},
        "shapes_in_place": {"inputs_are_left_alone"},
    },
    "kl": {
        "square": set(),
        "wrong_sign": {"positive_on_average"},
        "half_the_kl": {"anchored_by_hand"},
        "wrongly_never_negative": {"never_negative"},
        "ignores_ratio": {"the_ratio_makes_it_exact_off_policy"},
        "not_zero": {"zero_at_equality"},
        "explodes": {"extreme_log_probs_stay_finite"},
        "averages_tokens": {"tokens_are_independent"},
        "rounded_kl": {"float32_agrees_with_float64"},
        "wrong_slope": {"gradient_equals_finite_differences"},
        "writes_ratio": {"inputs_are_left_alone"},
    },
    "corrections": {
        "in_loss": set(),
        "on_batch": set(),
        "lively": {"weights_are_detached_and_finite"},
        "never_one": {"one_where_there_is_no_gap"},
        "micro_normal": {"micro_batches_change_nothing", "context_parallel_shards_change_nothing"},
        "no_clamp": {"extreme_log_ratios_stay_finite"},
        "forgets_to_declare": {"undeclared_inputs_are_not_needed"},
        "declares_too_much": {"declared_needs_are_read"},
        "writes_columns": {"inputs_are_left_alone"},
        "wrong_bound": {"anchored_by_hand"},
        "reads_tool_tokens": {"masked_tokens_change_nothing"},
        "needs_tokens": {"odd_samples_are_harmless"},
        "by_place": {"packing_and_order_change_nothing"},
    },
    "filters": {
        "keeps_all": set(),
        "moody": {"decides_the_same_twice"},
        "marks_samples": {"groups_are_left_alone"},
        "needs_rewards": {"odd_groups_are_judged"},
        "silent_drop": {"a_drop_has_a_reason"},
    },
    "buffer_filters": {
        "takes_first": set(),
        "oldest_last": set(),
        "takes_turns": {"chooses_the_same_twice"},
        "takes_too_many": {"chooses_positions_that_are_there"},
        "takes_any": {"chooses_the_same_twice"},
        "marks_items": {"items_are_left_alone"},
    },
    "rewards": {
        "length": set(),
        "first_is_best": {"order_changes_nothing"},
        "noisy": {"order_changes_nothing", "scores_the_same_twice", "scores_the_same_in_a_worker_process"},
        # What it gives is nowhere taken for a number.
        "not_finite": {
            "every_sample_gets_a_finite_number",
            "an_empty_response_is_scored",
            "order_changes_nothing",
            "scores_the_same_in_a_worker_process",
        },
        "stumbles_on_empty": {"an_empty_response_is_scored"},
        "writes_metadata": {"groups_are_left_alone"},
        "keeps_state": {"scores_the_same_in_a_worker_process"},
        "mistaken": {"examples_get_their_rewards"},
        "compares_raw_text": {"examples_get_their_rewards"},
    },
    "generators": {
        "one_turn": set(),
        "tool_log_probs": {"lengths_agree"},
        "invents": {"trained_tokens_are_the_engines"},
        "overdraws": {"the_budget_is_kept"},
        "hides_aborts": {"an_abort_ends_it"},
        "swallows_errors": {"engine_errors_surface"},
        "mixes_episodes": {"episodes_keep_apart"},
        "changes_its_mind": {"a_retry_repeats_the_response"},
        "starts_anew": {"a_partial_rollout_continues"},
        "needs_room": {"a_response_without_room_is_a_sample"},
    },
    "collectors": {
        "collects": set(),
        "last_first": {"a_step_has_the_requested_groups"},
        "rerolls": {"collects_the_same_twice"},
        "skips_its_observer": {"its_observer_gets_every_step"},
        "loses_prompts": {"no_prompt_is_lost_or_used_twice"},
        "ignores_filters": {"refused_groups_are_replaced"},
        "makes_do": {"the_end_of_the_data_is_an_error"},
    },
    "sources": {
        "counts": set(),
        "ignores_seed": {"another_seed_gives_another_order"},
        "forgets_position": {"a_restored_source_continues", "a_state_of_other_data_is_refused"},
        "renumbers": {"draws_are_numbered_for_ever"},
        "with_replacement": {"an_epoch_has_every_row_once"},
        "wide_tokens": {"prompts_are_rendered"},
        "no_fingerprint": {"the_fingerprint_follows_the_data", "a_state_of_other_data_is_refused"},
        "forgets_others": {"a_state_of_other_data_is_refused"},
        "by_chance": {
            "the_same_seed_gives_the_same_draws",
            "draws_do_not_depend_on_how_many_are_taken",
            "a_restored_source_continues",
        },
        # Sorted, all seeds give one order.
        "sorts_chunks": {"draws_do_not_depend_on_how_many_are_taken", "another_seed_gives_another_order"},
    },
    "renderers": {
        "renders": set(),
        "wide_ids": {"a_row_becomes_a_prompt"},
        "drops_labels": {"a_row_becomes_a_prompt"},
        "counts_rows": {"renders_the_same_twice"},
        "fills_in": {"a_missing_key_is_an_error"},
        "fills_the_context": {"long_prompts_are_refused"},
    },
    "media": {
        "sees": set(),
        "needs_a_word": {"it_declares_an_engine_capability"},
        "shifts_places": {"an_image_has_its_places", "pixels_fit_the_tokens"},
        "leaves_one_out": {"pixels_fit_the_tokens"},
        "greets": {"rows_without_media_are_text"},
        "renames": {"renders_the_same_twice"},
        "raises_as_it_comes": {"damaged_media_are_an_error"},
    },
    "middlewares": {
        "passes": set(),
        "reseeds": {"requests_and_completions_pass_through", "requests_keep_apart"},
        "calms": {"errors_surface"},
        "swaps": {"requests_keep_apart"},
        "clings": {"a_cancelled_request_ends"},
        "counts_in_sets": {"counters_are_numbers"},
    },
    "trackers": {
        "takes_notes": set(),
        "leaves_open": {"it_logs_and_closes"},
        "averages_nothing": {"a_run_without_steps_is_closed_too"},
        "clears_metrics": {"metrics_are_left_alone"},
        "requires_finite": {"numbers_that_are_not_finite_are_accepted"},
        "starts_once": {"a_resumed_run_continues"},
        "tidies_up": {"other_files_are_left_alone"},
    },
    "transports": {
        "carries": set(),
        "rounds": {"what_arrives_is_what_was_exported", "sending_again_changes_nothing"},
        "boasts": {"its_report_is_true"},
        "only_once": {"sending_again_changes_nothing"},
        "forgives": {"a_refused_bucket_surfaces"},
        "looks_away": {"an_engine_that_stays_behind_is_an_error"},
        "carries_nothing": {"no_weights_are_an_error"},
    },
    "launchers": {
        "starts_nothing": set(),
        "starts_anyway": {"without_specs_it_starts_nothing"},
        "stops_once": {"it_can_be_stopped_at_any_time"},
    },
    "optimizers": {
        "signs": set(),
        "fixed_rate": {"the_learning_rate_is_that_of_the_groups"},
        "noisy_steps": {"a_step_repeats_to_the_bit", "saved_and_loaded_it_continues_to_the_bit"},
        "hides_momentum": {"saved_and_loaded_it_continues_to_the_bit"},
        "declares_no_moment": {"its_moments_are_as_declared"},
        "widens": {"bfloat16_stays_bfloat16"},
    },
}
FAULTY_MODELS: dict[str, dict[str, set[str]]] = {
    "backends": {
        "careless_sums": {
            "log_probs_equal_those_of_transformers",
            "micro_batches_change_nothing",
            "any_layout_trains_as_one_rank",
            "gradients_add_up_until_the_optimizer_steps",
        },
        # All that compare two runs to the bit.
        "unrepeatable": {
            "a_step_repeats_to_the_bit",
            "a_step_that_is_not_finite_changes_nothing",
            "a_micro_batch_without_memory_changes_nothing",
            "saved_and_loaded_it_continues_to_the_bit",
            "sleep_loses_nothing",
            "the_settings_of_a_step_are_those_of_its_call",
            "what_is_staged_is_of_that_instant",
        },
        "careless_state": {
            "export_equals_what_transformers_loads",
            "gradients_equal_those_of_transformers",
            "saved_and_loaded_it_continues_to_the_bit",
            "sleep_loses_nothing",
            "what_is_staged_is_of_that_instant",
        },
        "careless_checks": {
            "a_critic_learns",
            "a_step_that_is_not_finite_changes_nothing",
            "an_incomplete_checkpoint_is_refused",
            "the_settings_of_a_step_are_those_of_its_call",
            "weights_that_overflow_are_reported",
            "copies_stay_frozen",
            "what_is_staged_is_of_that_instant",
        },
        "one_reports": {"layouts_cover_the_ranks", "gradients_equal_those_of_transformers"},
    },
    "engines": {
        "shifted_log_probs": {
            "log_probs_equal_those_of_transformers",
            "an_abort_returns_what_there_is",
            "new_weights_are_used_under_their_version",
            "a_damaged_bucket_is_refused",
            "spans_separate_versions",
        },
        "careless_sampling": {
            "temperature_zero_takes_the_likeliest_token",
            "the_seed_decides_the_tokens",
            "company_changes_no_draw",
            "stop_strings_end_a_response",
            "a_response_ends_where_it_should",
            "its_stream_has_every_response_once",
            "a_structural_tag_is_respected_or_refused",
        },
        "careless_control": {
            "pause_holds_every_response",
            "a_damaged_bucket_is_refused",
            "sleep_loses_nothing",
            "a_stopped_engine_fails_its_requests",
        },
        "careless_versions": {
            "responses_come_in_the_order_of_requests",
            "new_weights_are_used_under_their_version",
            "its_checksum_is_that_of_the_weights",
            "a_damaged_bucket_is_refused",
            "an_abort_returns_what_there_is",
            "an_abort_at_once_does_no_harm",
            "spans_separate_versions",
        },
        # Nothing comes in between, neither an abort nor new weights.
        "blocks": {
            "the_loop_continues_meanwhile",
            "an_abort_returns_what_there_is",
            "an_abort_at_once_does_no_harm",
            "pause_holds_every_response",
            "spans_separate_versions",
            "a_stopped_engine_fails_its_requests",
        },
    },
}
"""Several faults in one plugin: a model takes its time."""
OF_EVERY_ENTRY = {
    "loose_options": {"it_keeps_its_contract", "unknown_options_are_refused"},
    "travels_badly": {"options_travel_to_workers", "it_keeps_its_contract"},
    "nothing_to_try": {"it_has_options_to_try"},
    "wrong_examples": {"it_has_options_to_try"},
    "raising_examples": {"it_has_options_to_try"},
    "no_such_part": {"it_has_options_to_try", "it_keeps_its_contract"},
}


OF_A_MUTANT = {
    "aggregation_is_anchored_by_hand",
    "loss_is_the_weighted_sum_of_its_parts",
    "old_log_probs_may_be_the_current_ones",
}
"""What the kit finds in a recipe when slime's own objective is wrong."""


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in FAULTS.items() for name in names])
def test_the_fault_is_found_by_name_and_nothing_else(faults, kind, name):
    expected = FAULTS[kind][name]
    assert faults.failures_of(kind, name) == expected
    for case, text in faults.failed.items():
        if case.startswith(f"{kind}::") and f"/{name}]" in case:
            prop = case.partition("::")[2].partition("[")[0]
            assert f"{name} (slime." in text
            assert f"breaks its contract: {prop}: " in text
    # The others have run, and there were some.
    if name not in ("nothing_to_try", "no_such_part"):
        assert faults.num_passed(kind, name) > 0


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in FAULTY_MODELS.items() for name in names])
def test_the_faults_of_a_model_are_found_by_name_and_nothing_else(models, kind, name):
    assert models.failures_of(kind, name) == FAULTY_MODELS[kind][name]
    assert models.num_passed(kind, name) > 5


def test_what_ships_with_a_model_keeps_its_contracts(models):
    for dist in shipped(with_a_model=True):
        failures = [f"{case}\n{text}" for case, text in models.failed.items() if f"{dist}/" in case]
        assert not failures, "\n\n".join(failures)
        assert models.is_sound(dist), f"{dist}\n{models.out}"
    # Some of acme-models, and only they, were to fail.
    assert not models.is_sound("acme-models")


@pytest.mark.parametrize("name", OF_EVERY_ENTRY)
def test_what_is_wrong_with_an_entry_point_is_found(faults, name):
    assert faults.failures_of("entries", name) == OF_EVERY_ENTRY[name]


def test_entry_points_are_sound_but_for_those(faults):
    wrong = {case.rpartition("/")[2].removesuffix("]") for case in faults.failed if case.startswith("entries::")}
    assert wrong == set(OF_EVERY_ENTRY)
    assert faults.code == 1


def test_a_mutant_of_the_objective_is_found(mutant):
    assert mutant.failures_of("algorithms", "right_recipe") == OF_A_MUTANT
    assert mutant.num_passed("algorithms", "right_recipe") == 12


def test_every_property_has_a_fault_that_breaks_it():
    """Or the kit might be unable to fail."""
    broken = {kind: set().union(*names.values()) for kind, names in (FAULTS | FAULTY_MODELS).items()}
    broken["algorithms"] |= OF_A_MUTANT
    broken["entries"] = set().union(*OF_EVERY_ENTRY.values())
    left = {kind.name: {prop.name for prop in kind.properties} - broken.get(kind.name, set()) for kind in KINDS}
    assert {kind: names for kind, names in left.items() if names} == {}

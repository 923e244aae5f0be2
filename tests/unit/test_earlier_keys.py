"""Run files and flags with the names of keys that 0.1 had give the same run, with one notice for each name."""

import pytest

from slime_core.config.earlier_keys import FLAGS, RENAMED, current_tables, notices
from slime_core.config.flags import FlagTable, kernel_flags
from slime_core.config.load import merge
from slime_core.config.run import RunConfig

OLD = {
    "rollout": {"ahead": 1, "on_reward_wrong": "leave_out", "on_reward_infra": "zero", "reward_choice_key": "kinds"},
    "eval": {"eval_on_the_side": True},
    "train": {"lr": 0.5},
}
NEW = {
    "rollout": {
        "max_async_level": 1,
        "on_reward_error": "mask",
        "on_reward_infra": "zero",
        "reward_select_key": "kinds",
    },
    "eval": {"async_eval": True},
    "train": {"lr": 0.5},
}


def test_tables_get_the_names_of_today():
    assert current_tables(OLD) == NEW
    assert current_tables(NEW) == NEW
    both = {"rollout": {"ahead": 1, "max_async_level": 3}}
    assert current_tables(both)["rollout"]["max_async_level"] == 3


def test_every_name_of_today_is_a_key():
    for table, key in RENAMED.values():
        inner = RunConfig.model_fields[table].annotation
        assert key in inner.model_fields, f"{table}.{key}"
    assert set(FLAGS.values()) <= set(FlagTable.of(kernel_flags()).by_name)


@pytest.mark.parametrize(
    "words",
    [
        ("--ahead", "2", "--on-reward-wrong", "leave_out", "--eval-on-the-side", "--no-eval-holds-weights"),
        ("--rollout.ahead=2", "--rollout.on_reward_wrong", "leave_out", "--eval.eval_on_the_side", "--no-eval-holds-weights"),
        ("--set", "rollout.ahead=2", "--set", "rollout.on_reward_wrong=leave_out", "--set", "eval.eval_on_the_side=true",
         "--set", "eval.eval_holds_weights=false"),
        ("--max-async-level", "2", "--on-reward-error", "mask", "--async-eval", "--no-eval-blocks-weight-update"),
    ],
)  # fmt: skip
def test_flags_of_0_1_set_the_keys_of_today(words):
    tables = merge({}, FlagTable.of(kernel_flags()).parse(words))
    config = {table: {key: str(value).lower() for key, value in keys.items()} for table, keys in tables.items()}
    assert config == {
        "rollout": {"max_async_level": "2", "on_reward_error": "mask"},
        "eval": {"async_eval": "true", "eval_blocks_weight_update": "false"},
    }


def test_there_is_one_notice_for_each_old_name():
    assert notices(NEW, ["--max-async-level", "1"]) == []
    assert len(notices(OLD, ["--ahead", "3", "--no-eval-holds-weights"])) == 5
    assert notices({}, ["--set", "rollout.ahead=2"]) == [
        "rollout.ahead (--ahead) is now rollout.max_async_level (--max-async-level); the old name works until 0.3."
    ]


def test_a_run_file_of_0_1_binds_with_a_warning(bound, capsys):
    run = bound("--ahead", "1", extra="eval = { eval_on_the_side = true }")
    assert run.config.rollout.max_async_level == 1
    assert run.config.eval.async_eval
    warned = capsys.readouterr().err
    for old in (
        "rollout.ahead (--ahead) is now rollout.max_async_level",
        "eval.eval_on_the_side (--eval-on-the-side) is now",
    ):
        assert warned.count(f"warning: {old}") == 1

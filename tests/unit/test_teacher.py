"""Recipes without rewards, without advantages or with a teacher: what binding makes of them, and every complaint."""

from __future__ import annotations

import json
import re
import shutil

import pytest

from slime_core.config.roles import FROZEN_MODEL_KEYS
from slime_core.contracts.backend import REFERENCE, TEACHER
from slime_core.contracts.needs import Need
from slime_core.controller.learner import LearnerPlan
from slime_core.controller.manifest import resolved_config
from slime_core.controller.run_inputs import check_copy
from slime_core.data.model_folder import load_tokenizer
from slime_core.errors import ConfigError, ModelError
from slime_models.new_model import ModelSizes, new_model

OPD = ("--algo", "opd", "--opd-teacher-load", "teacher")
SFT = ("--algo", "sft", "--n-samples-per-prompt", "1", "--global-batch-size", "4")
WITHOUT_REWARD = """
name = "tiny"
model = { hf_checkpoint = "base" }
plugin = ["fakes.py"]
data = { prompt_data = ["train.jsonl"], input_key = "prompt", label_key = "label" }
backend = "fake"
engine = "fake"
algo = "grpo"
rollout = { rollout_batch_size = 4, n_samples_per_prompt = 8, rollout_max_response_len = 16 }
train = { num_rollout = 3, global_batch_size = 32 }
"""


@pytest.fixture
def complaints(bound):
    def problems(*flags, **how):
        with pytest.raises(ConfigError) as caught:
            bound(*flags, **how)
        return caught.value.problems

    return problems


def only(problems, pattern):
    assert len(problems) == 1, problems
    assert re.search(pattern, problems[0]), problems[0]


# --- A teacher --------------------------------------------------------------------------------------------------------


def test_a_teacher_is_a_frozen_copy_that_is_scored(bound, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = bound(*OPD, "--kl-loss-coef", "0.1")
    (actor,) = run.roles
    assert [(s.column, s.weights, s.by_others) for s in actor.plan.scoring] == [
        (Need.OLD_LOGPROBS, "actor", True),
        (Need.REF_LOGPROBS, "reference", False),
        (Need.TEACHER_LOGPROBS, "teacher", True),
    ]
    assert dict(actor.frozen_models) == {REFERENCE: tmp_path / "base", TEACHER: tmp_path / "teacher"}
    # Only the reference follows the policy.
    assert actor.plan.updated_frozen_models == (REFERENCE,)
    assert set(actor.frozen_models) == set(FROZEN_MODEL_KEYS)
    assert Need.TEACHER_LOGPROBS in actor.needs


def test_the_engines_log_probs_spare_the_students_forward(bound):
    (actor,) = bound(*OPD, "--use-rollout-logprobs").roles
    assert [s.column for s in actor.plan.scoring] == [Need.TEACHER_LOGPROBS]


def test_a_teacher_beside_a_task_reward(bound):
    run = bound("--advantage-terms", "reverse_kl", "--opd-kl-coef", "0.25", "--opd-teacher-load", "teacher")
    assert [part.name for part in run.algo.estimators] == ["group_norm", "reverse_kl"]
    assert run.algo.advantage_terms[0].config.opd_kl_coef == 0.25
    rules = LearnerPlan.of(run).rules
    assert rules.advantage_needs == frozenset()
    assert [needs for _, needs in rules.advantage_terms] == [{Need.OLD_LOGPROBS, Need.TEACHER_LOGPROBS}]
    keys = resolved_config(run)["algo"]
    assert keys["advantage_terms"] == [{"name": "reverse_kl", "opd_kl_coef": 0.25}]
    # The teacher's signal is there with one sample per prompt too.
    bound(
        "--advantage-terms", "reverse_kl", "--opd-teacher-load", "teacher", "--n-samples-per-prompt", "1",
        "--global-batch-size", "4",
    )  # fmt: skip


def test_a_teacher_that_is_missing_or_not_used(complaints):
    only(complaints("--algo", "opd"), r'model.opd_teacher_load: reverse_kl of algorithm "opd".*--opd-teacher-load')
    only(complaints("--opd-teacher-load", "teacher"), r'no part of algorithm "grpo" compares with a teacher')


# --- Rewards and advantages -------------------------------------------------------------------------------------------


def test_a_reward_is_needed_where_something_reads_it(bound, complaints):
    assert bound(*OPD, text=WITHOUT_REWARD).rewards == ()
    assert bound(*SFT, text=WITHOUT_REWARD).rewards == ()
    only(complaints(text=WITHOUT_REWARD), r'reward: algorithm "grpo" needs one')
    beside = ("--advantage-terms", "reverse_kl", "--opd-teacher-load", "teacher")
    only(complaints(*beside, text=WITHOUT_REWARD), r'reward: algorithm "grpo" needs one')


def test_a_recipe_without_advantages(bound, complaints):
    run = bound(*SFT)
    assert (run.algo.advantage, run.algo.estimators, run.algo.needs) == (None, (), frozenset())
    (actor,) = run.roles
    assert actor.plan.scoring == ()
    assert resolved_config(run)["algo"]["advantage"] is None
    assert LearnerPlan.of(run).rules.advantage is None
    only(complaints(*SFT, "--loss", "clip"), r'algo.advantage: loss "clip" uses advantages')
    only(complaints(*SFT, "--kl-coef", "0.1", "--kl-reward-type", "k1"), r"takes no KL in the reward")
    terms = complaints(*SFT, "--advantage-terms", "reverse_kl", "--opd-teacher-load", "teacher")
    assert any(re.search(r'advantage_terms: loss "sft" uses no advantages', problem) for problem in terms), terms


def test_an_advantage_that_the_loss_does_not_use_needs_nothing(bound):
    run = bound(*SFT, "--advantage", "reverse_kl")
    assert run.algo.needs == frozenset()


# --- The collector ----------------------------------------------------------------------------------------------------


def test_the_recipe_names_the_collector_unless_the_run_file_does(bound):
    assert bound().collector.name == "accepted"
    run = bound(*SFT, "--rollout.collector", "sft", "--collector.loss-mask-type", "last_assistant")
    assert run.collector.name == "sft"
    assert resolved_config(run)["rollout"]["collector"] == {"name": "sft", "loss_mask_type": "last_assistant"}
    # Learning from what the policy wrote and the filters kept.
    assert bound("--algo", "sft", "--rollout.collector", "accepted").collector.name == "accepted"


def test_a_collector_checks_the_rollout_table(complaints):
    only(complaints("--algo", "sft"), r"rollout.n_samples_per_prompt = 8: a row of the data has one response")


# --- The teacher's folder ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A student, a larger teacher with its tokenizer, and one that has another."""
    made = tmp_path_factory.mktemp("teachers")
    sizes = ModelSizes(hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1, intermediate_size=16, max_length=16)
    larger = ModelSizes(hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=1, intermediate_size=16, max_length=16)
    new_model(made / "student", "qwen3", sizes, alphabet="0123")
    new_model(made / "teacher", "qwen3", larger, alphabet="0123", seed=1)
    new_model(made / "other", "qwen3", sizes, alphabet="0132")
    return made


def check(folder, student):
    tokenizer = load_tokenizer(student, trust_remote_code=False)
    check_copy(folder, tokenizer, where="model.opd_teacher_load", trust_remote_code=False)


def test_a_teacher_may_be_larger_and_come_without_a_tokenizer(folders, tmp_path):
    check(folders / "teacher", folders / "student")
    bare = shutil.copytree(folders / "teacher", tmp_path / "bare")
    for file in bare.glob("tokenizer*"):
        file.unlink()
    check(bare, folders / "student")


def test_folders_that_are_no_teacher(folders, tmp_path):
    with pytest.raises(ModelError, match=r"model.opd_teacher_load = .*gone: no such folder"):
        check(tmp_path / "gone", folders / "student")
    with pytest.raises(ModelError, match=r"other: its tokenizer is another one than the run's: 2 tokens differ.*'2'"):
        check(folders / "other", folders / "student")
    small = shutil.copytree(folders / "teacher", tmp_path / "small")
    config = json.loads((small / "config.json").read_text())
    (small / "config.json").write_text(json.dumps(config | {"vocab_size": 3}))
    with pytest.raises(ModelError, match=r"small: that model has 3 tokens, the run's tokenizer 6"):
        check(small, folders / "student")
    (small / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="no weights in it"):
        check(small, folders / "student")


# --- A teacher behind engines -----------------------------------------------------------------------------------------


SCORES = ("--engines.teacher.engine", "local")


def test_a_teacher_behind_engines_is_no_copy(bound, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = bound("--algo", "opd", "--engines.teacher.load", "teacher", "--engines.teacher.num_gpus", "2", *SCORES)
    assert run.teacher.num_engines == 2
    assert run.teacher.engine.name == "local"
    (actor,) = run.roles
    assert TEACHER not in actor.frozen_models
    assert Need.TEACHER_LOGPROBS not in actor.needs
    assert Need.TEACHER_LOGPROBS not in [scoring.column for scoring in actor.plan.scoring]


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (("--algo", "grpo"), "no part of algorithm"),
        ((*OPD,), "Leave one of them out"),
        (("--algo", "opd", "--rollout-temperature", "0.7"), "at temperature 1"),
        (("--algo", "opd", "--colocate"), "devices of its own"),
    ],
)
def test_conflicts_with_a_teacher_on_engines(complaints, flags, problem):
    only(complaints(*flags, "--engines.teacher.load", "teacher", *SCORES), problem)


def test_an_engine_that_cannot_score(complaints):
    only(complaints("--algo", "opd", "--engines.teacher.load", "teacher"), "gives no log-probs of given tokens")

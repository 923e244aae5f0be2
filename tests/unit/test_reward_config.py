"""Several rewards, policies for their failures, halves of a run: what a run file may set."""

import re

import pytest

from slime_core.controller.manifest import resolved_config
from slime_core.errors import ConfigError
from slime_core.rollout.scoring import ScoringPlan

BASE = """
name = "tiny"
model = { hf_checkpoint = "base" }
plugin = ["fakes.py"]
data = { prompt_data = ["train.jsonl"], input_key = "prompt", label_key = "label" }
backend = "fake"
engine = "fake"
rollout = { rollout_batch_size = 4, n_samples_per_prompt = 8, rollout_max_response_len = 16 }
train = { num_rollout = 3, global_batch_size = 32 }
algo = "grpo"
"""
TWO = BASE + 'rewards = ["one", { name = "two", weight = 0.5, label = "second", reward_key = "acc" }]\n'
SPANS = """
from slime_core.contracts.reward import RewardDriver
from slime_core.plugin import driver


@driver("slime.rewards", "steps")
class Steps(RewardDriver):
    gives_spans = True

    @classmethod
    def build(cls, config):
        return None
"""
ASKS = """
from slime_core.contracts.reward import RewardDriver
from slime_core.contracts.engine import Capability, EngineDriver
from slime_core.plugin import driver


@driver("slime.rewards", "asks")
class Asks(RewardDriver):
    @classmethod
    def needs_reward_model(cls, config):
        return True

    @classmethod
    def build(cls, config):
        raise AssertionError("it asks engines")


@driver("slime.engines", "responses")
class Responses(EngineDriver):
    optional_capabilities = frozenset({Capability.HTTP})

    @classmethod
    def build(cls, config):
        return None
"""


def problems_of(bound, *flags, **how):
    with pytest.raises(ConfigError) as caught:
        bound(*flags, **how)
    return "\n".join(caught.value.problems)


def test_several_rewards_with_their_weights(bound):
    sets = '[eval.datasets]\nown = { path = "o", reward = "two" }\nt = { path = "t" }\n'
    run = bound("--reward-retries", "2", text=TWO, extra=sets)
    plan = ScoringPlan.of(run.rewards, run.config.rollout)
    assert [(r.label, r.weight, r.reward_key) for r in plan.rewards] == [("one", 1.0, None), ("second", 0.5, "acc")]
    assert plan.retries == 2
    own, other = run.evals
    assert [reward.label for reward in own.rewards] == ["two"]
    assert other.rewards == run.rewards
    assert resolved_config(run)["rewards"] == [
        {"name": "one", "weight": 1.0, "label": None, "reward_key": None},
        {"name": "two", "weight": 0.5, "label": "second", "reward_key": "acc"},
    ]
    assert {"rewards[0] one", "rewards[1] two"} <= {f"{part.where} {part.name}" for part in run.parts}
    assert [r.label for r in bound("--rewards", "two", "one", text=TWO).rewards] == ["two", "one"]
    by_flag = bound("--rewards", '[{ name = "two", weight = -1 }]', text=BASE)
    assert [(r.label, r.weight) for r in by_flag.rewards] == [("two", -1.0)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (TWO + 'reward = "one"\n', "reward and rewards: both are set. Set `reward` for one"),
        (TWO.replace('"second"', '"one"'), 'rewards: two are called "one"'),
        (TWO.replace('"two"', '"twoo"'), r'rewards\[1\]\.name = "twoo": unknown reward; close match: two'),
        (TWO.replace("weight", "wieght"), r"rewards\[1\]\.wieght: unknown option"),
        (TWO.replace("0.5", "nan"), "rewards"),
        (TWO.replace("n_samples", "reward_key = 'x', n_samples"), "put reward_key into its table"),
    ],
)
def test_rewards_that_do_not_fit_are_reported(bound, text, expected):
    assert re.search(expected, problems_of(bound, text=text))


def test_each_kind_of_failure_has_its_policy(bound):
    run = bound("--on-reward-failure", "fail_sample", "--on-reward-timeout", "zero", "--on-reward-infra", "error")
    policies = ScoringPlan.of(run.rewards, run.config.rollout).policies
    assert policies == {"wrong": "fail_sample", "timeout": "zero", "infra": "error"}
    plain = bound()
    assert set(ScoringPlan.of(plain.rewards, plain.config.rollout).policies.values()) == {"error"}


def test_rewards_of_spans_require_an_advantage_that_takes_them(bound, tmp_path):
    (tmp_path / "spans.py").write_text(SPANS)
    text = BASE.replace('["fakes.py"]', '["fakes.py", "spans.py"]') + 'reward = "steps"\n'
    assert '"steps" rewards spans of a response, and advantage "group_norm"' in problems_of(bound, text=text)
    assert bound("--algo", "reinforce_plus_plus", text=text).rewards[0].label == "steps"


def test_halves_of_a_run(bound, tmp_path):
    expected = problems_of(
        bound, "--debug-train-only", "--debug-rollout-only", "--use-pytorch-profiler", "--profile-step-start", "2"
    )
    for text in (
        "rollout.debug_rollout_only and train.debug_train_only",
        "--load-debug-train-data FOLDER",
        "debug.profile_step_end = 2 must be more than profile_step_start = 2",
    ):
        assert text in expected
    sets = '[eval.datasets]\nt = { path = "t" }\n'
    words = ("--debug-train-only", "--load-debug-rollout-data", str(tmp_path / "d"))
    assert f"rollout dumps of {tmp_path}/d: no such folder. Set rollouts/" in problems_of(bound, *words)
    (tmp_path / "d").mkdir()
    assert "it has no step_*.parquet" in problems_of(bound, *words)
    (tmp_path / "d" / "step_0.parquet").touch()
    replayed = bound(*words, extra=sets)
    assert (replayed.collector.name, replayed.collector.config.folder) == ("replay", str(tmp_path / "d"))
    assert (replayed.generates, replayed.reads_prompts, replayed.evals) == (False, False, ())
    absent = problems_of(bound, "--load-debug-train-data", str(tmp_path / "absent"))
    assert f"train.load_debug_train_data = {tmp_path}/absent: no such folder. Set train_data/" in absent
    recorded = bound("--load-debug-train-data", str(tmp_path / "d"), extra=sets)
    assert not recorded.generates
    assert recorded.evals
    both = problems_of(bound, "--load-debug-rollout-data", "d", "--rollout.collector", "accepted")
    assert "both set where groups come from" in both


MODEL = ("--engines.reward.load", "judge", "--engines.reward.engine", "responses")


def test_a_reward_that_asks_a_model_of_the_run(bound, tmp_path):
    (tmp_path / "asks.py").write_text(ASKS)
    text = BASE.replace('"fakes.py"', '"fakes.py", "asks.py"')
    run = bound("--reward", "asks", *MODEL, "--engines.reward.num_gpus", "2", text=text)
    (row,) = run.served
    assert (row.name, row.engine.name, row.num_engines, row.num_devices) == ("reward", "responses", 2, 1)
    assert "responses" in {part.name for part in run.parts}
    assert "there is none. Pass --engines.reward.load FOLDER" in problems_of(bound, "--reward", "asks", text=text)
    assert "no reward of this run asks it" in problems_of(bound, "--reward", "one", *MODEL, text=text)
    deaf = ("--reward", "asks", *MODEL[:2])
    assert 'engine "fake" serves no requests over HTTP' in problems_of(bound, *deaf, text=text)
    asked_in_eval = '[eval.datasets]\nt = { path = "t", reward = "asks" }\n'
    assert "engines of this run serve" in problems_of(bound, "--reward", "one", text=text, extra=asked_in_eval)

"""Configurations of verl to run files, and its reward functions."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from slime_compat.config import VerlRewardConfig
from slime_compat.run_document import run_file
from slime_compat.verl import settings
from slime_compat.verl.command import translated
from slime_compat.verl.defaults import DEFAULTS
from slime_compat.verl.plugin import VerlReward
from slime_core.contracts.example import RewardExample
from slime_core.errors import ConfigError, PluginError, RewardError
from slime_plugin_kit.groups import group_of

PEERS = Path(__file__).parent / "peers"
SLIME = [sys.executable, "-c", "from slime_core.cli.main import main; main()"]
MAIN = ["python3", "-m", "verl.trainer.main_ppo"]
PLAIN = ["algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=4", "trainer.total_training_steps=10"]
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


def translate(*overrides: str, **chosen: Any):
    return translated(settings.read([*MAIN, *PLAIN, *overrides]), **chosen)


def changes(translation) -> dict[str, str]:
    return {note.flag: note.text for note in translation.notes if note.trains}


@pytest.mark.parametrize("source", ["verl.sh", "config.yaml"])
def test_a_script_and_a_file_become_these_run_files(source, monkeypatch):
    monkeypatch.chdir(PEERS)
    made = run_file(translated(settings.read([source])).tables, source)
    assert made == (PEERS / f"{source}.toml").read_text()


@pytest.mark.parametrize(
    ("overrides", "path", "value"),
    [
        ("data.train_batch_size=8 actor_rollout_ref.actor.ppo_mini_batch_size=2", "train.global_batch_size", 8),
        ("actor_rollout_ref.actor.use_dynamic_bsz=True", "train.max_tokens_per_gpu", 16384),
        ("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=3", "train.micro_batch_size", 3),
        ("actor_rollout_ref.actor.optim.lr=2e-6", "train.lr", 2e-6),
        ("actor_rollout_ref.actor.optim.lr_scheduler_type=cosine actor_rollout_ref.actor.ppo_mini_batch_size=1024",
         "train.lr_decay_style", "cosine"),
        ("actor_rollout_ref.actor.kl_loss_coef=0.1", "algo.kl_loss_coef", None),
        ("actor_rollout_ref.actor.use_kl_loss=True", "algo.kl_loss_type", "low_var_kl"),
        ("actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_type=kl", "algo.kl_loss_type", "k1"),
        ("algorithm.norm_adv_by_std_in_grpo=False", "algo.disable_grpo_std_normalization", True),
        ("actor_rollout_ref.actor.policy_loss.loss_mode=gspo", "algo.name", "gspo"),
        ("actor_rollout_ref.actor.policy_loss.loss_mode=gspo", "algo.aggregation", "seq_mean"),
        ("actor_rollout_ref.actor.policy_loss.loss_mode=cispo", "algo.eps_clip_c", None),
        ("actor_rollout_ref.actor.clip_ratio_c=10", "algo.eps_clip_c", 10.0),
        ("actor_rollout_ref.actor.clip_ratio_high=0.28", "algo.eps_clip_high", 0.28),
        ("algorithm.adv_estimator=rloo", "algo.name", "rloo"),
        ("algorithm.adv_estimator=reinforce_plus_plus algorithm.use_kl_in_reward=true", "algo.kl_coef", 0.001),
        (
            "algorithm.rollout_correction.rollout_is=token",
            "algo.corrections",
            [{"name": "mis", "tis_level": "token", "tis_mode": "truncate", "tis_upper_bound": 2.0, "rs_veto_threshold": 0.0}],
        ),
        ("data.train_files=~/a/train.parquet", "data.prompt_data", "~/a/train.parquet"),
        ("data.train_files=\"['a.parquet','b.parquet']\"", "data.prompt_data", ["a.parquet", "b.parquet"]),
        ("data.train_max_samples=100 data.train_files=a.parquet", "data.prompt_data", "a.parquet@[0:100]"),
        ("data.shuffle=False", "data.rollout_shuffle", False),
        ("+data.apply_chat_template_kwargs.think=False", "data.apply_chat_template_kwargs", {"think": False}),
        ("data.val_files=data/math/test.parquet", "eval.datasets", {"math": {"path": "data/math/test.parquet"}}),
        ("trainer.val_before_train=False", "eval", None),
        ("trainer.val_before_train=False trainer.test_freq=5", "eval.skip_eval_before_train", True),
        ("actor_rollout_ref.rollout.val_kwargs.top_p=0.7", "eval.eval_top_p", 0.7),
        ("actor_rollout_ref.rollout.top_k=0", "rollout.rollout_top_k", -1),
        ("trainer.nnodes=2", "launcher.rollout_num_gpus", 16),
        ("trainer.nnodes=1 trainer.n_gpus_per_node=1", "launcher.name", "local"),
        ("trainer.save_freq=20", "checkpoint.save_interval", 20),
        ("trainer.logger=console", "trackers", None),
        ("trainer.logger=['console','mlflow']", "trackers",
         ["jsonl", {"name": "mlflow", "experiment": "verl_examples", "run_name": "gsm8k"}]),
        ("reward_model.enable=True reward_model.model.path=rm", "engines.reward",
         {"load": "rm", "num_gpus": 2, "num_gpus_per_engine": 2}),
        ("actor_rollout_ref.model.lora_rank=8", "backend.lora_alpha", 16),
        ("--config-name=ppo_megatron_trainer.yaml actor_rollout_ref.actor.megatron.tensor_model_parallel_size=4",
         "backend", {"name": "megatron", "tensor_model_parallel_size": 4}),
        ("--config-name ppo_megatron_trainer actor_rollout_ref.actor.megatron.virtual_pipeline_model_parallel_size=null",
         "backend", {"name": "megatron"}),
        ("actor_rollout_ref.actor.router_replay.mode=R3", "train.use_rollout_routing_replay", True),
    ],
)  # fmt: skip
def test_keys_become_keys(overrides, path, value):
    words = [word.replace('"', "") for word in overrides.split()]
    translation = translate(*words)
    assert not changes(translation)
    assert translation.get(path) == value


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("algorithm.adv_estimator=remax", "remax: slime has none of this name"),
        ("algorithm.adv_estimator=grop", "close match: grpo"),
        (f"{ACTOR}.policy_loss.loss_mode=geo_mean", r"write a loss (slime.losses). clip is in its place"),
        (f"{ACTOR}.ppo_epochs=2", "a batch is trained on once here"),
        (f"{ACTOR}.ppo_mini_batch_size=300", "must be a multiple of it"),
        (f"{ACTOR}.optim.lr=fast", '"fast": must be a number; 1e-06 is used'),
        (f"{ACTOR}.loss_agg_mode=tokens", "tokens: unknown; token-mean is in its place"),
        (f"{ACTOR}.entropy_coef=0.1", f"unknown key; close match: {ACTOR}.entropy_coeff"),
        (f"{ACTOR}.optim.lr_warmup_steps=3", "with each rollout step of 4 optimizer steps in verl"),
        ("algorithm.use_kl_in_reward=True", "grpo has no KL penalty in the reward here"),
        (f"{ROLLOUT}.n=1", "has no advantage without a second sample"),
        ("data.truncation=left", "left: longer prompts are left out here, not cut"),
        (f"{ROLLOUT}.multi_turn.enable=True", "tools and agent loops of verl are its own classes"),
        ("data.custom_cls.path=x.py", "verl's data classes are not used"),
        ("reward_model.reward_manager=batch", "the function is called for each response here"),
        ("--config-name=mine", "mine.yaml: no such file"),
    ],
)
def test_what_changes_the_training_is_reported(override, expected):
    found = changes(translate(override))
    (text,) = [text for key, text in found.items() if key.lstrip("-") == override.partition("=")[0].lstrip("-")]
    assert expected in text


@pytest.mark.parametrize(
    ("engine", "table"),
    [
        ("sglang", {"name": "sglang", "mem_fraction_static": 0.6}),
        ("vllm", {"name": "vllm", "gpu_memory_utilization": 0.6}),
        ("local", {"name": "local"}),
    ],
)
def test_the_share_of_memory_has_the_name_of_the_engine(engine, table):
    name = "actor_rollout_ref.rollout"
    translation = translate(f"{name}.gpu_memory_utilization=0.6", f"{name}.name=vllm", engine=engine)
    assert translation.tables["engine"] == table
    named = [note.text for note in translation.notes if note.flag == f"{name}.name"]
    assert named == [] if engine == "vllm" else "--engine names another" in named[0]


def test_a_ratio_without_low_and_high_has_no_effect_in_verl():
    translation = translate(f"{ACTOR}.clip_ratio=0.3")
    assert (translation.get("algo.eps_clip"), translation.get("algo.eps_clip_high")) == (0.2, 0.2)
    assert "no effect in verl" in {note.flag: note.text for note in translation.notes}[f"{ACTOR}.clip_ratio"]


def test_epochs_are_counted_as_verl_counts_them(tmp_path):
    file = tmp_path / "train.parquet"
    pq.write_table(pa.table({"prompt": ["a"] * 23}), file)
    words = ["trainer.total_training_steps=null", "data.train_batch_size=5", f"{ACTOR}.ppo_mini_batch_size=5"]
    translation = translate(*words, f"data.train_files={file}", "trainer.total_epochs=3")
    # 4 whole batches of 23 rows.
    assert translation.get("train.num_rollout") == 12
    ratio = translate(
        *words, f"data.train_files={file}", f"{ACTOR}.optim.lr_warmup_steps_ratio=0.5", "trainer.total_epochs=3"
    )
    assert ratio.get("train.lr_warmup_iters") == 6
    assert translate(*words, "data.train_files=nowhere.parquet").get("train.num_epoch") == 30


def test_verls_own_file_of_all_keys_has_no_unknown_key():
    """The keys that the rules read, with verl's defaults and references, as verl prints its configuration."""
    given = {key: value for key, value in DEFAULTS.items() if value is not None}
    translation = translated(settings.VerlSettings(given=given, source="defaults", folder=Path(), megatron=False))
    assert not [note for note in translation.notes if "unknown key" in note.text]


@pytest.mark.parametrize("scale", [1 / 1024, 2.0])
def test_a_scaled_gradient_with_scaled_clip_and_eps_makes_the_same_step(scale):
    """seq-mean-token-sum is written as a mean over L tokens, and the critic's loss without its factor of 1/2."""
    gradients = np.random.default_rng(0).normal(size=(5, 8)) * 10.0 ** -np.arange(5)[:, None]
    np.testing.assert_allclose(adam(gradients, 1.0, 1e-8), adam(gradients * scale, scale, 1e-8 * scale), rtol=1e-12)


def adam(gradients: np.ndarray, clip: float, eps: float) -> np.ndarray:
    """The sum of Adam's steps (arXiv:1412.6980), with gradients cut to the norm `clip`."""
    first, second, total = np.zeros(8), np.zeros(8), np.zeros(8)
    for t, gradient in enumerate(gradients, start=1):
        cut = gradient * min(1.0, clip / np.linalg.norm(gradient))
        first, second = 0.9 * first + 0.1 * cut, 0.999 * second + 0.001 * cut**2
        total += first / (1 - 0.9**t) / (np.sqrt(second / (1 - 0.999**t)) + eps)
    return total


def test_overrides_of_hydra_and_references_are_read(tmp_path):
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump({"defaults": ["ppo_trainer"], "data": {"train_batch_size": 16}}))
    words = [
        f"--config-path={tmp_path}",
        "--config-name",
        "mine",
        "+a.b={c: 1}",
        "~data.seed=1",
        "++x=${a.b.c}",
        "y=${z}",
    ]
    given = settings.read([*MAIN, *words]).given
    assert given == {"data.train_batch_size": 16, "a.b.c": 1, "x": 1}


# --- Reward functions -------------------------------------------------------------------------------------------------


def rewards_of(tmp_path: Path, code: str, metadata: dict[str, Any] | None = None, **options: Any):
    file = tmp_path / "own.py"
    file.write_text(code)
    reward = VerlReward.build(VerlRewardConfig(path=str(file), **options))
    row = {"data_source": "sums", "reward_model": {"ground_truth": "4"}, "extra_info": {"index": 3}}
    example = RewardExample(prompt="2+2=", responses=("4", "5"), metadata=row if metadata is None else metadata)
    return reward.score(group_of(example.responses, example=example))


def test_a_function_gets_the_columns_of_its_row(tmp_path):
    code = """
async def compute_score(data_source, solution_str, ground_truth, extra_info, scale):
    assert data_source == "sums" and extra_info == {"index": 3}
    return {"score": scale * (solution_str == ground_truth), "kind": "text", "long": len(solution_str)}
"""
    values = rewards_of(tmp_path, code, reward_kwargs={"scale": 2})
    assert values == [{"score": 2.0, "long": 1.0}, {"score": 0.0, "long": 1.0}]
    plain = "def other(solution_str, **row):\n    return solution_str == row['ground_truth']\n"
    assert rewards_of(tmp_path, plain, function="other") == [{"score": 1.0}, {"score": 0.0}]


@pytest.mark.parametrize(
    ("code", "metadata", "expected"),
    [
        ("def compute_score(**row):\n    return 1\n", {"a": 1},
         'no reward_model.ground_truth in its metadata, which has: a. Set data.metadata_key = "*"'),
        ("def compute_score(**row):\n    return 'good'\n", None, "returned 'good'; it must return a number, or a dict"),
        ("def compute_score(**row):\n    return {'acc': 1}\n", None, 'a dict must have "score"'),
    ],
)  # fmt: skip
def test_wrong_values_name_what_is_missing(tmp_path, code, metadata, expected):
    with pytest.raises(RewardError) as raised:
        rewards_of(tmp_path, code, metadata)
    assert expected in str(raised.value)


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("def compute_scores():\n    pass\n", 'reward.function = "compute_score"'),
        ("def compute_scores():\n    pass\n", "close match: compute_scores. It has: compute_scores"),
        ("1 / 0\n", "importing it raised ZeroDivisionError"),
    ],
)
def test_a_function_that_is_missing_is_named(tmp_path, code, expected):
    with pytest.raises(PluginError) as raised:
        rewards_of(tmp_path, code)
    assert expected in str(raised.value)


def test_for_its_own_functions_verl_must_be_installed():
    with pytest.raises(
        PluginError, match=r"verl.utils.reward_score cannot be imported: .* Install verl, set reward.path"
    ):
        VerlReward.build(VerlRewardConfig(path="verl"))
    with pytest.raises(PluginError, match=r'reward.path = "nowhere.py": no such Python file'):
        VerlReward.build(VerlRewardConfig(path="nowhere.py"))


# --- The command ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["nowhere.yaml"], "nowhere.yaml: no such file."),
        (["list.yaml"], "list.yaml: must contain a mapping of keys to values."),
        (["nowhere.sh"], "nowhere.sh: no such launch script."),
        (["python3", "-m", "other"], "python3 -m other: neither a file nor a line that starts verl.trainer.main_ppo"),
    ],
)
def test_what_cannot_be_read_is_named(words, expected, tmp_path, monkeypatch):
    (tmp_path / "list.yaml").write_text("- 1\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as raised:
        settings.read(words)
    assert expected in str(raised.value)


def test_a_script_that_starts_another_program_is_one_message_with_exit_code_2(tmp_path):
    (tmp_path / "empty.sh").write_text("true\n")
    ended = subprocess.run(
        [*SLIME, "compat", "verl", "empty.sh"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "error: empty.sh: it starts no verl.trainer.main_ppo." in ended.stderr
    assert "Traceback" not in ended.stderr


def test_the_command_prints_the_run_file_and_what_changes_the_training(tmp_path):
    line = [*MAIN, *PLAIN, f"{ACTOR}.ppo_epochs=4", "trainer.balance_batch=False"]
    for own, code in (([], 9), (["--lenient"], 0)):
        ended = subprocess.run(
            [*SLIME, "compat", "verl", *own, "--", *line], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert ended.returncode == code, ended.stderr
        assert tomllib.loads(ended.stdout)["rollout"]["n_samples_per_prompt"] == 4
        assert f"CHANGES THE TRAINING  {ACTOR}.ppo_epochs: 4: a batch is trained on once here" in ended.stderr

"""Scripts of TRL's GRPOTrainer to run files, and its reward functions."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slime_compat.config import TrlRewardConfig
from slime_compat.run_document import run_file
from slime_compat.trl.command import translated
from slime_compat.trl.defaults import DEFAULTS
from slime_compat.trl.plugin import TrlReward
from slime_core.contracts.example import RewardExample
from slime_core.errors import ConfigError, PluginError, RewardError
from slime_plugin_kit.groups import group_of

PEERS = Path(__file__).parent / "peers"
SLIME = [sys.executable, "-c", "from slime_core.cli.main import main; main()"]
PLAIN = "max_steps=8, per_device_train_batch_size=4, gradient_accumulation_steps=2, num_generations=4"
TRAINER = 'GRPOTrainer(model="base", reward_funcs=judge, args=config, train_dataset=load_dataset("json", data_files="a.jsonl"))'


@pytest.fixture
def translate(tmp_path, monkeypatch):
    """`translate(keywords, ...)` translates a script with these keywords of GRPOConfig."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": [{"role": "user", "content": "1+1="}]}) + "\n")

    def run(keywords: str = "", *, before: str = "", trainer: str = TRAINER, **chosen: Any):
        imports = "from my_rewards import judge\nfrom trl import GRPOConfig, GRPOTrainer\n"
        Path("train.py").write_text(f"{imports}{before}\nconfig = GRPOConfig({PLAIN}, {keywords})\n{trainer}.train()\n")
        return translated(Path("train.py"), num_processes=1, **chosen)

    return run


def changes(translation) -> dict[str, str]:
    return {note.flag: note.text for note in translation.notes if note.trains}


def test_a_script_becomes_this_run_file(monkeypatch, tmp_path):
    monkeypatch.chdir(PEERS)
    translation = translated(Path("trl_train.py"), num_processes=1)
    assert run_file(translation.tables, "trl_train.py") == Path("trl_train.py.toml").read_text()
    assert not changes(translation)


def test_the_defaults_are_those_of_the_installed_trl():
    grpo = pytest.importorskip("trl").GRPOConfig
    theirs = {item.name: item.default for item in dataclasses.fields(grpo)}
    assert {name: value for name, value in DEFAULTS.items() if name in theirs} == {
        name: theirs[name] for name in DEFAULTS if name in theirs
    }
    # An older keyword.
    assert set(DEFAULTS) - set(theirs) == {"max_prompt_length"}


def test_every_keyword_of_trl_is_known(translate):
    grpo = pytest.importorskip("trl").GRPOConfig
    names = [item.name for item in dataclasses.fields(grpo) if item.name not in PLAIN]
    translation = translate(", ".join(f"{name}=None" for name in names if name not in DEFAULTS))
    assert not [note.flag for note in translation.notes if "unknown key" in note.text]


@pytest.mark.parametrize(
    ("keywords", "path", "value"),
    [
        ("", "rollout.rollout_batch_size", 2),
        ("", "train.global_batch_size", 8),
        ("steps_per_generation=8", "rollout.rollout_batch_size", 8),
        ("steps_per_generation=8", "train.num_rollout", 2),
        ("generation_batch_size=16", "rollout.rollout_batch_size", 4),
        ("save_steps=20, generation_batch_size=16", "checkpoint.save_interval", 10),
        ("learning_rate=2 * 1e-6", "train.lr", 2e-6),
        ("lr_scheduler_type='cosine', warmup_ratio=0.25", "train.lr_warmup_iters", 2),
        ("lr_scheduler_type='constant', warmup_steps=3", "train.lr_warmup_iters", None),
        ("loss_type='grpo'", "algo.aggregation", "seq_mean"),
        ("loss_type='dr_grpo'", "algo.aggregation", "constant"),
        ("", "algo.aggregation", "token_mean"),
        ("loss_type='cispo', epsilon_high=5.0", "algo.eps_clip_high", 4.0),
        ("importance_sampling_level='sequence', epsilon=3e-4", "algo.name", "gspo"),
        ("epsilon=0.1", "algo.eps_clip_high", 0.1),
        ("epsilon_high=0.28", "algo.eps_clip_high", 0.28),
        ("delta=1.5", "algo.eps_clip_c", 1.5),
        ("scale_rewards=False", "algo.disable_grpo_std_normalization", True),
        ("scale_rewards=True", "algo.disable_grpo_std_normalization", None),
        ("beta=0.04", "algo.kl_loss_type", "k3"),
        ("beta=0.04, use_bias_correction_kl=False", "algo.use_unbiased_kl", False),
        ("mask_truncated_completions=True", "rollout.filters", ["overlong_filter"]),
        ("top_k=0", "rollout.rollout_top_k", -1),
        ("top_k=None, top_p=0.9", "rollout.rollout_top_p", 0.9),
        ("max_completion_length=1024 * 2", "rollout.rollout_max_response_len", 2048),
        ("bf16=False", "backend.precision", "float32"),
        ("use_vllm=True, vllm_mode='server', vllm_tensor_parallel_size=2", "launcher.rollout_num_gpus", 2),
        ("use_vllm=True, vllm_importance_sampling_correction=False", "algo.corrections", None),
        (
            "use_vllm=True, vllm_importance_sampling_mode='token_truncate'",
            "algo.corrections",
            [{"name": "mis", "tis_level": "token", "tis_mode": "truncate", "tis_upper_bound": 3.0, "rs_veto_threshold": 0.0}],
        ),
        ("sync_ref_model=True, ref_model_mixup_alpha=1.0, ref_model_sync_steps=4", "train.ref_update_interval", 4),
        ("report_to=['tensorboard']", "trackers", ["jsonl", "tensorboard"]),
        ("output_dir='runs/my run'", "name", "my-run"),
        ("seed=7", "seed", 7),
    ],
)  # fmt: skip
def test_keywords_become_keys(translate, keywords, path, value):
    translation = translate(keywords)
    assert not changes(translation)
    assert translation.get(path) == value


@pytest.mark.parametrize(
    ("keywords", "flag", "expected"),
    [
        ("learning_rate=rate()", "learning_rate", "line 4: rate(): no literal; TRL's default is used"),
        ("**further", "**further", "line 4: further: no literal"),
        ("temprature=1.0", "temprature", "unknown key; close match: temperature"),
        ("num_iterations=2", "num_iterations", "a batch is trained on once here"),
        ("loss_type='sapo'", "loss_type", "sapo: write a loss"),
        ("scale_rewards='batch'", "scale_rewards", "by the group's standard deviation here"),
        ("min_p=0.1", "min_p", "rollouts are sampled without it here"),
        ("top_entropy_quantile=0.2", "top_entropy_quantile", "no counterpart"),
        ("generation_batch_size=6", "num_generations", "4: does not divide the 6 completions of a batch"),
        ("optim='adafactor'", "optim", "adafactor: Adam is in its place"),
        ("max_prompt_length=64", "max_prompt_length", "longer prompts are left out here"),
        ("learning_rate='high'", "learning_rate", '"high": must be a number; 1e-06 is used'),
    ],
)
def test_what_changes_the_training_is_reported(translate, keywords, flag, expected):
    assert expected in changes(translate(keywords))[flag]


def test_names_of_literals_are_read_and_others_are_not(translate):
    before = "LENGTH = 64\nRATE = 1e-6\nRATE = 2e-6\n"
    translation = translate("max_completion_length=LENGTH * 2, learning_rate=RATE", before=before)
    assert translation.get("rollout.rollout_max_response_len") == 128
    assert "RATE: no literal" in changes(translation)["learning_rate"]


@pytest.mark.parametrize(
    ("functions", "paths"),
    [
        ("judge", ["my_rewards.judge"]),
        ("[judge, trl.rewards.accuracy_reward]", ["my_rewards.judge", "trl.rewards.accuracy_reward"]),
    ],
)
def test_reward_functions_are_named_by_their_modules(translate, functions, paths):
    translation = translate(before="import trl.rewards", trainer=TRAINER.replace("judge", functions))
    tables = translation.get("rewards") or [translation.get("reward")]
    assert [table["path"] for table in tables] == paths


@pytest.mark.parametrize(
    ("trainer", "flag", "expected"),
    [
        (TRAINER.replace("judge", "own"), "reward_funcs", "own: importing the script would train"),
        (TRAINER.replace("judge", "'org/rm'"), "reward_funcs", "org/rm: a reward model is served by engines.reward"),
        (TRAINER.replace("judge", "make()"), "reward_funcs", "make(): no function of a module"),
        (TRAINER.replace('"base"', "build()"), "model", "build(); set model.hf_checkpoint"),
        (TRAINER.replace('"a.jsonl")', '"a.jsonl").map(f)'), "train_dataset", "made by code, by map in line 6"),
        (TRAINER.replace("args=config", "args=config, tools=[search]"), "GRPOTrainer(tools=...)", "[search]: left out"),
    ],
)
def test_what_is_known_only_while_the_script_runs_is_reported(translate, trainer, flag, expected):
    assert (
        expected in changes(translate(before="def own(completions, **columns):\n    return []", trainer=trainer))[flag]
    )


def test_flags_of_a_script_with_a_parser_are_its_keywords(tmp_path):
    script = tmp_path / "grpo.py"
    script.write_text("parser = TrlParser((GRPOConfig,))\nGRPOTrainer(args=parser.parse_args()[0])\n")
    words = "--learning_rate 2e-6 --model_name_or_path org/base --dataset_name org/sums --reward_funcs accuracy_reward own.f"
    translation = translated(script, [*words.split(), "--bf16", "false"], num_processes=4)
    assert translation.get("train.lr") == 2e-6
    assert translation.get("backend.precision") == "float32"
    assert [table["path"] for table in translation.get("rewards")] == ["trl.rewards.accuracy_reward", "own.f"]
    assert (translation.get("data.prompt_data"), translation.get("model.hf_checkpoint")) == ("sums.jsonl", "org/base")
    assert translation.get("train.global_batch_size") == 32


# --- Reward functions -------------------------------------------------------------------------------------------------


def rewards_of(write_module, code: str, **metadata: Any):
    folder = write_module("trl_function", code)
    reward = TrlReward.build(TrlRewardConfig(path="trl_function.judge", python_path=(folder,)))
    return reward.score(
        group_of(("4", "5"), example=RewardExample(prompt="2+2=", responses=("4", "5"), metadata=metadata))
    )


def test_a_function_gets_the_columns_as_lists(write_module):
    code = """
        def judge(prompts, completions, completion_ids, solution, **columns):
            assert prompts == ["2+2="] * 2 and columns == {"level": [3, 3]} and len(completion_ids) == 2
            return [1 if text == right else None for text, right in zip(completions, solution)]
    """
    assert rewards_of(write_module, code, solution="4", level=3) == [1.0, 0.0]


@pytest.mark.parametrize(
    ("code", "error", "expected"),
    [
        ("def judge(completions, **columns):\n    return [1]\n", RewardError, "it must return a list of 2 numbers"),
        ("def judge(completions, **columns):\n    return ['a', 'b']\n", RewardError, "returned 'a' for a completion"),
        (
            "def judge(completions, log_metric, **columns):\n    return 1\n",
            PluginError,
            "it requires log_metric, which rewards",
        ),
        ("def judges():\n    pass\n", PluginError, "close match: judges"),
    ],
)
def test_wrong_functions_are_named(write_module, code, error, expected):
    with pytest.raises(error) as raised:
        rewards_of(write_module, code)
    assert expected in str(raised.value)


# --- The command ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (None, "train.py: no such script."),
        ("def f(:\n", "train.py: invalid syntax"),
        ("print(1)\n", "train.py: it calls no GRPOConfig(...); only scripts of GRPOTrainer are translated."),
        ("GRPOConfig()\nGRPOConfig()\n", "train.py: it calls GRPOConfig in lines 1, 2. Leave one of them"),
    ],
)
def test_what_cannot_be_read_is_named(code, expected, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if code is not None:
        Path("train.py").write_text(code)
    with pytest.raises(ConfigError) as raised:
        translated(Path("train.py"))
    assert expected in str(raised.value)


def test_the_command_prints_the_run_file_and_what_changes_the_training(tmp_path):
    for code, exit_code, expected in (
        ("print(1)\n", 2, "error: train.py: it calls no GRPOConfig(...)"),
        (
            "GRPOConfig(num_iterations=2)\nraise SystemExit(5)\n",
            9,
            "CHANGES THE TRAINING  num_iterations: 2: a batch is trained",
        ),
    ):
        (tmp_path / "train.py").write_text(code)
        ended = subprocess.run(
            [*SLIME, "compat", "trl", "train.py"], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert ended.returncode == exit_code, ended.stderr
        assert expected in ended.stderr
        assert "Traceback" not in ended.stderr

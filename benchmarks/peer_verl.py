"""verl's side of peer_gpu.py: the overrides of one run of its FSDP2 trainer with SGLang, and what it logged.

verl runs as `python -m verl.trainer.main_ppo` in the folder of verl_bundle/build.sh, unchanged. What is not verl's default:

    attn_implementation sdpa, use_remove_padding off      there is no flash_attn; SDPA skips a mask that has no padding
    use_fused_kernels                                     without flash_attn's cross entropy verl reads log-probs row by row
    bypass_mode                                           old log-probs are the engine's, as in the run of slime beside it
    verl_shims.py                                         what it needs beside newer packages
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

REWARD = '''
import random


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    """Something that differs between the responses of a prompt; most tokens of the random model have no text."""
    return float(random.random() < 0.5)
'''
PLAIN_PROMPT = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
"""A chat template that adds nothing: both sides' prompts have the same tokens."""


PYTHON_PATH = (Path(__file__).resolve().parent / "verl_bundle",)
"""Folders of modules that its processes import."""


def write_data(folder: Path, prompts: list[str]) -> None:
    rows = [
        {
            "data_source": "letters",
            "prompt": [{"role": "user", "content": prompt}],
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"index": place},
        }
        for place, prompt in enumerate(prompts)
    ]
    (folder / "prompts_verl.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward_verl.py").write_text(REWARD)


def overrides(asked: argparse.Namespace, folder: Path, samples: int) -> dict[str, Any]:
    """Hydra's overrides; lists and tables as JSON."""
    actor, rollout, data = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", str(folder / "prompts_verl.jsonl")
    fsdp, optim, model = f"{actor}.fsdp_config", f"{actor}.optim", "actor_rollout_ref.model"
    prompts = asked.requests // samples
    values: dict[str, Any] = {
        "algorithm.adv_estimator": "grpo",
        "algorithm.rollout_correction.bypass_mode": True,
        "data.train_files": data,
        "data.val_files": data,
        "data.train_batch_size": prompts,
        "data.max_prompt_length": asked.prompt_tokens,
        "data.max_response_length": asked.new_tokens,
        "data.filter_overlong_prompts": False,
        "data.shuffle": False,
        "data.dataloader_num_workers": 0,
        f"{model}.path": str(folder / "model"),
        f"{model}.custom_chat_template": PLAIN_PROMPT,
        f"{model}.use_remove_padding": False,
        f"{model}.enable_gradient_checkpointing": asked.recompute,
        f"{model}.use_fused_kernels": asked.verl_log_probs != "plain",
        f"+{model}.override_config.attn_implementation": "sdpa",
        f"{actor}.strategy": "fsdp2",
        f"{actor}.ppo_mini_batch_size": prompts,
        f"{actor}.use_dynamic_bsz": True,
        f"{actor}.ppo_max_token_len_per_gpu": asked.train_tokens,
        f"{actor}.loss_agg_mode": "seq-mean-token-mean",
        f"{fsdp}.model_dtype": asked.state_dtype,
        f"{fsdp}.param_offload": asked.offload,
        f"{fsdp}.optimizer_offload": asked.offload,
        f"{optim}.lr": asked.lr,
        f"{optim}.weight_decay": asked.weight_decay,
        f"{optim}.betas": list(asked.betas),
        f"{optim}.override_optimizer_config": {"fused": True},
        f"{rollout}.name": "sglang",
        f"{rollout}.n": samples,
        f"{rollout}.tensor_model_parallel_size": 1,
        f"{rollout}.gpu_memory_utilization": asked.engine["mem_fraction_static"],
        f"{rollout}.max_num_seqs": asked.concurrency,
        f"{rollout}.agent.num_workers": asked.verl_workers,
        "reward.num_workers": asked.verl_workers,
        "reward.custom_reward_function.path": str(folder / "reward_verl.py"),
        "trainer.n_gpus_per_node": 1,
        "trainer.logger": ["console", "file"],
        "trainer.val_before_train": False,
        "trainer.resume_mode": "disable",
        "trainer.total_training_steps": asked.steps,
        "ray_kwargs.ray_init.num_cpus": asked.cores,
        **{
            f"+{rollout}.engine_kwargs.sglang.{name}": value
            for name, value in asked.engine.items()
            if name != "mem_fraction_static"
        },
    }
    if asked.verl_log_probs != "plain":
        values[f"{model}.fused_kernel_options.impl_backend"] = asked.verl_log_probs
    return values


def words(values: dict[str, Any]) -> list[str]:
    return [f"{name}={written(value)}" for name, value in values.items()]


def written(value: Any) -> str:
    """As Hydra's grammar reads it."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{name}:{written(inner)}" for name, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(written, value)) + "]"
    if isinstance(value, str):
        return "'" + value.replace("'", "\\'") + "'"
    return json.dumps(value)


def command(asked: argparse.Namespace, folder: Path, samples: int) -> list[str]:
    return [
        asked.peer_python, "-m", "verl.trainer.main_ppo", f"hydra.run.dir={folder / 'hydra'}",
        *words(overrides(asked, folder, samples)), *asked.verl,
    ]  # fmt: skip


def environment(asked: argparse.Namespace, folder: Path) -> dict[str, str]:
    """What differs from this process's environment."""
    modules = [os.environ.get("VERL_USE_EXTERNAL_MODULES", ""), "verl_shims"]
    return {
        "VERL_FILE_LOGGER_PATH": str(folder / "verl.jsonl"),
        "VERL_USE_EXTERNAL_MODULES": ",".join(filter(None, modules)),
        "HYDRA_FULL_ERROR": "1",
    }


def steps_of(folder: Path) -> list[dict[str, float]]:
    path = folder / "verl.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line)["data"] for line in lines if line.endswith("\n")]


def row(logged: dict[str, float], samples: int) -> dict[str, float]:
    """Seconds and tokens of a step; `samples` responses."""
    response = logged["response_length/mean"] * samples
    return {
        "logged_s": logged["timing_s/step"],
        "rollout_s": logged["timing_s/gen"],
        "train_s": logged["timing_s/update_actor"],
        "weights_s": logged["timing_s/update_weights"],
        "response_tokens": response,
        "tokens": logged["perf/total_num_tokens"],
        "trainer_gib": logged["actor/perf/max_memory_allocated_gb"],
        "grad_norm": logged["actor/grad_norm"],
    }

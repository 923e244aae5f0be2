"""TRL's side of peer_gpu.py: GRPOTrainer with transformers' own generation. Run as a program it imports nothing of slime.

    python peer_trl.py SETTINGS.json STEPS.jsonl

Weights are the trainer's own, so that there is no weight update. Rollout is the whole of `_generate_and_score_completions`.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SAME = ("steps", "new_tokens", "lr", "weight_decay", "betas", "recompute", "state_dtype", "device")


PYTHON_PATH: tuple[Path, ...] = ()


def write_data(folder: Path, prompts: list[str]) -> None:
    (folder / "prompts_trl.json").write_text(json.dumps(prompts))


def command(asked: argparse.Namespace, folder: Path, samples: int) -> list[str]:
    length = asked.prompt_tokens + asked.new_tokens
    micro = max(size for size in range(1, asked.requests + 1) if fits(size, length, asked))
    settings = {name: getattr(asked, name) for name in SAME} | {
        "model": str(folder / "model"),
        "prompts": str(folder / "prompts_trl.json"),
        "micro_batch": micro,
        "micro_batches": asked.requests // micro,
        "samples": samples,
        "further": asked.trl,
    }
    (folder / "trl.json").write_text(json.dumps(settings))
    return [asked.peer_python, __file__, str(folder / "trl.json"), str(folder / "trl.jsonl")]


def fits(size: int, length: int, asked: argparse.Namespace) -> bool:
    return asked.requests % size == 0 and (size == 1 or size * length <= asked.train_tokens)


def environment(asked: argparse.Namespace, folder: Path) -> dict[str, str]:
    return {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "0"}


def steps_of(folder: Path) -> list[dict[str, float]]:
    path = folder / "trl.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def row(logged: dict[str, float], samples: int) -> dict[str, float]:
    return {**logged, "response_tokens": logged["mean_length"] * samples, "weights_s": 0.0}


def options_of(settings: dict[str, Any], output_dir: str) -> dict[str, Any]:
    """Of GRPOConfig."""
    on_gpu, bf16_state = settings["device"] == "cuda", settings["state_dtype"] == "bf16"
    return {
        "output_dir": output_dir,
        "use_cpu": not on_gpu,
        "bf16": on_gpu,
        "gradient_checkpointing": settings["recompute"],
        "per_device_train_batch_size": settings["micro_batch"],
        "gradient_accumulation_steps": settings["micro_batches"],
        "steps_per_generation": settings["micro_batches"],
        "max_steps": settings["steps"],
        "num_generations": settings["samples"],
        "max_completion_length": settings["new_tokens"],
        "generation_kwargs": {"min_new_tokens": settings["new_tokens"]},
        "temperature": 1.0,
        "beta": 0.0,
        "loss_type": "grpo",
        "learning_rate": settings["lr"],
        "lr_scheduler_type": "constant",
        "weight_decay": settings["weight_decay"],
        "adam_beta1": settings["betas"][0],
        "adam_beta2": settings["betas"][1],
        "max_grad_norm": 1.0,
        "optim": "adamw_torch_fused",
        "logging_steps": 1,
        "logging_nan_inf_filter": False,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "model_init_kwargs": {
            "dtype": "bfloat16" if bf16_state else "float32",
            "attn_implementation": "sdpa",
        },
    }


def main() -> None:
    import torch
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    settings = json.loads(Path(sys.argv[1]).read_text())
    on_gpu = settings["device"] == "cuda"

    def now() -> float:
        if on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter()

    class Timed(GRPOTrainer):  # type: ignore[misc]
        rollout_s = 0.0

        def _generate_and_score_completions(self, inputs: Any) -> Any:
            began = now()
            made = super()._generate_and_score_completions(inputs)
            self.rollout_s += now() - began
            return made

    class Steps(TrainerCallback):  # type: ignore[misc]
        """A line of the second file for each optimizer step."""

        began = 0.0
        seen = 0.0

        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            self.began = now()

        def on_log(self, *args: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
            if logs is None or "completions/mean_length" not in logs:
                return
            step_s, rollout_s = now() - self.began, trainer.rollout_s
            tokens = logs["num_tokens"] - self.seen
            self.seen, self.began, trainer.rollout_s = logs["num_tokens"], now(), 0.0
            line = {
                "logged_s": step_s,
                "rollout_s": rollout_s,
                "train_s": step_s - rollout_s,
                "mean_length": logs["completions/mean_length"],
                "tokens": tokens,
                "grad_norm": logs.get("grad_norm", 0.0),
                "trainer_gib": torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0,
            }
            with Path(sys.argv[2]).open("a") as file:
                file.write(json.dumps(line) + "\n")

    prompts = json.loads(Path(settings["prompts"]).read_text())
    with tempfile.TemporaryDirectory() as output_dir:
        trainer = Timed(
            model=settings["model"],
            reward_funcs=lambda completion_ids, **_: [float(ids[-1] % 2) for ids in completion_ids],
            args=GRPOConfig(**options_of(settings, output_dir) | settings["further"]),
            train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
            callbacks=[Steps()],
        )
        trainer.train()


if __name__ == "__main__":
    main()

"""TRL's half of trl_cpu.py: GRPOTrainer on one machine's CPU, timed by its own callbacks. Imports nothing of slime.

python trl_grpo.py SETTINGS.json RESULT.json

A rollout batch here is one generation and the optimizer steps on it; its time goes from the end of the last optimizer step
of the batch before to the end of its own last one. Token counts are those of TRL's own log.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from trl import GRPOConfig, GRPOTrainer

BOXED = re.compile(r".*\\boxed\{([^{}]*)\}", re.DOTALL)


def boxed_reward(completions: list[str], label: list[str], **_: Any) -> list[float]:
    """1 for a completion whose last box contains the label's integer, else 0."""
    return [float(is_right(text, required)) for text, required in zip(completions, label, strict=True)]


def is_right(text: str, required: str) -> bool:
    found = BOXED.match(text)
    return found is not None and found.group(1).isdecimal() and int(found.group(1)) == int(required)


class BatchClock(TrainerCallback):
    """Seconds of each rollout batch, and what TRL logged of it."""

    def __init__(self, steps_per_batch: int) -> None:
        self.seconds: list[float] = []
        self.cpu_seconds: list[float] = []
        self.logged: list[dict[str, float]] = []
        self._steps_per_batch = steps_per_batch
        self._began = 0.0
        self._used = 0.0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._began, self._used = time.perf_counter(), time.process_time()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.global_step % self._steps_per_batch == 0:
            now, used = time.perf_counter(), time.process_time()
            self.seconds.append(now - self._began)
            self.cpu_seconds.append(used - self._used)
            self._began, self._used = now, used

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        if logs is not None and "completions/mean_length" in logs:
            self.logged.append(dict(logs))


def trainer_config(settings: dict[str, Any], output_dir: str) -> GRPOConfig:
    """TRL's fastest settings here: no recomputation, no saving, reporting or progress bar."""
    samples = settings["prompts"] * settings["samples_per_prompt"]
    steps_per_batch, micro_batches = settings["steps_per_batch"], settings["micro_batches_per_step"]
    return GRPOConfig(
        output_dir=output_dir,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        # All samples in one call of generate (TRL counts it in micro-batches), then each optimizer step on its share.
        per_device_train_batch_size=samples // (steps_per_batch * micro_batches),
        gradient_accumulation_steps=micro_batches,
        steps_per_generation=steps_per_batch * micro_batches,
        num_iterations=1,
        max_steps=settings["batches"] * steps_per_batch,
        num_generations=settings["samples_per_prompt"],
        max_completion_length=settings["max_response_len"],
        temperature=1.0,
        beta=0.0,
        loss_type="grpo",
        epsilon=settings["eps_clip"],
        epsilon_high=settings["eps_clip_high"],
        learning_rate=settings["lr"],
        # A polynomial of power 1 is the linear decay that ends above zero.
        lr_scheduler_type="polynomial",
        lr_scheduler_kwargs={"lr_end": settings["min_lr"], "power": 1.0},
        warmup_steps=settings["lr_warmup_iters"],
        adam_beta1=settings["adam_beta1"],
        adam_beta2=settings["adam_beta2"],
        adam_epsilon=settings["adam_eps"],
        weight_decay=settings["weight_decay"],
        max_grad_norm=settings["clip_grad"],
        optim="adamw_torch_fused",
        seed=settings["seed"],
        # One log a rollout batch, to the callback only: it holds the token counts.
        logging_steps=steps_per_batch,
        logging_nan_inf_filter=False,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        model_init_kwargs={"dtype": "float32"},
    )


def main() -> None:
    settings = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(settings["threads"])
    rows = [json.loads(line) for line in Path(settings["prompt_data"]).read_text().splitlines()]
    dataset = Dataset.from_list(
        [{"prompt": row[settings["input_key"]], "label": row[settings["label_key"]]} for row in rows]
    )
    clock = BatchClock(settings["steps_per_batch"])
    with tempfile.TemporaryDirectory() as output_dir:
        trainer = GRPOTrainer(
            model=settings["hf_checkpoint"],
            reward_funcs=boxed_reward,
            args=trainer_config(settings, output_dir),
            train_dataset=dataset,
            callbacks=[clock],
        )
        trainer.train()
    samples = settings["prompts"] * settings["samples_per_prompt"]
    batches, seen = [], 0.0
    for seconds, cpu_seconds, logs in zip(clock.seconds, clock.cpu_seconds, clock.logged, strict=True):
        batches.append(
            {
                "seconds": seconds,
                "cpu_seconds": cpu_seconds,
                "sampled": round(logs["completions/mean_length"] * samples),
                # Prompt and completion tokens since the start; every one of them is in one forward and backward.
                "trained": round(logs["num_tokens"] - seen),
                "reward": logs["reward"],
            }
        )
        seen = logs["num_tokens"]
    Path(sys.argv[2]).write_text(json.dumps({"batches": batches, "threads": torch.get_num_threads()}))


if __name__ == "__main__":
    main()

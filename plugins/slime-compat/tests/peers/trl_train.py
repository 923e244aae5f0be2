"""A training script of TRL as people have them, in small. It is read, not run."""

from datasets import load_dataset
from rewards import right, short
from trl import GRPOConfig, GRPOTrainer

STEPS = 2

trainer = GRPOTrainer(
    model="base",
    reward_funcs=[right, short],
    args=GRPOConfig(
        output_dir="out/sums",
        learning_rate=1e-3,
        lr_scheduler_type="constant_with_warmup",
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        num_generations=4,
        max_completion_length=4,
        max_steps=STEPS * 2,
        steps_per_generation=4,
        beta=0.01,
        reward_weights=[1.0, 0.5],
        mask_truncated_completions=True,
        logging_steps=1,
    ),
    train_dataset=load_dataset("json", data_files="train.jsonl", split="train"),
)
trainer.train()

"""The cookbook's rl_loop, with another reward: the share of a, e and i among eight characters. rl_loop.py LOSS STEPS LOG"""

import sys

from tinker_cookbook.recipes import rl_loop


def letters(response: str, _: str) -> float:
    return sum(character in "aei" for character in response) / 8


if __name__ == "__main__":
    rl_loop.get_reward = letters
    rl_loop.main(
        rl_loop.Config(
            model_name="Qwen/Qwen3-8B",
            log_path=sys.argv[3],
            batch_size=8,
            group_size=16,
            max_tokens=8,
            learning_rate=2e-2,
            lora_rank=8,
            save_every=0,
            loss_fn=sys.argv[1],
            max_steps=int(sys.argv[2]),
        )
    )

"""The cookbook's sl_loop. sl_loop.py LOG"""

import sys

from tinker_cookbook.recipes import sl_loop

if __name__ == "__main__":
    sl_loop.main(
        sl_loop.Config(
            model_name="Qwen/Qwen3-8B",
            log_path=sys.argv[1],
            batch_size=8,
            learning_rate=1e-2,
            lora_rank=8,
            save_every=4,
            max_steps=8,
        )
    )

"""Seconds of a forward_backward of 64 x 256 tokens in a session, for each line that it is sent.

direct_throughput.py MODEL FOLDER"""

import sys
import time
from pathlib import Path

import numpy as np
from served_process import RUN_FILE

from slime_session import Datum, open_session
from slime_tinker.run_command import FORCED, NOT_USED

if __name__ == "__main__":
    model, folder = Path(sys.argv[1]), Path(sys.argv[2])
    (folder / "run.toml").write_text(RUN_FILE.format(model=model))
    with open_session(folder / "run.toml", overrides={**NOT_USED, **FORCED}) as session:
        adapter = session.add_adapter("direct", rank=8, seed=0)
        datums = [
            Datum(
                tokens=[60 + (row + 7 * n) % 90 for n in range(257)],
                prompt_length=1,
                loss_weights=np.ones(256, np.float32),
            )
            for row in range(64)
        ]
        for _ in sys.stdin:
            began = time.perf_counter()
            adapter.forward_backward(session.batch(datums), loss="sft")
            print("SECONDS", time.perf_counter() - began, flush=True)
            adapter.optim_step(lr=1e-4)

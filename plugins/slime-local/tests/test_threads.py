"""The engine's number of threads is its own, and no result depends on it."""

import os
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
from local_oracle import prompts, request

from slime_local.threads import PartThreads, choose_threads, use_threads
from slime_models.new_model import ModelSizes, new_model


def threads_of_another():
    found = []
    other = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    other.start()
    other.join()
    return found[0]


def test_other_threads_keep_theirs():
    found = []

    def engine():
        use_threads(1)
        found.extend([torch.get_num_threads(), threads_of_another()])

    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        thread = threading.Thread(target=engine)
        thread.start()
        thread.join()
        assert found == [1, 3]
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("asked", "parameters", "expected"), [(0, 10**6, 1), (0, 10**9, 3), (2, 10**6, 2)])
def test_small_models_take_one(asked, parameters, expected):
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert choose_threads(asked, parameters) == expected
    finally:
        torch.set_num_threads(before)


def test_parts_have_their_order_and_all_end():
    ended = []

    def compute(part):
        if part == 3:
            raise ValueError("three")
        ended.append(part)
        return part * 10, torch.is_inference_mode_enabled()

    threads = PartThreads(2)
    assert threads.map(compute, [0, 1, 2, 4, 5]) == [(part * 10, True) for part in (0, 1, 2, 4, 5)]
    ended.clear()
    with pytest.raises(ValueError, match="three"):
        threads.map(compute, [3, 1, 2, 4])
    assert {1, 4} <= set(ended)
    threads.close()


async def test_rows_that_threads_share_have_the_same_bits(engines, qwen3):
    before, found = torch.get_num_threads(), []
    asked = [request(n, tokens, seed=n, max_new_tokens=4) for n, tokens in enumerate(prompts(600, low=2, high=6))]
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            engine = await engines(qwen3, max_batch=1024)
            found.append(await engine.generate(asked))
    finally:
        torch.set_num_threads(before)
    assert sum(len(one.token_ids) for one in found[0]) > 1800
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one.token_ids, other.token_ids)
        np.testing.assert_array_equal(one.log_probs, other.log_probs)


STARTS = """
import asyncio, sys, threading
from pathlib import Path
import torch
from slime_core.contracts.setup import EngineSetup
from slime_local.plugin import Local

async def start():
    folder = Path(sys.argv[1])
    setup = EngineSetup(
        index=0, model_path=folder, device="cpu", seed=0, max_context_len=64, max_batch=64, run_dir=folder
    )
    engine = Local.build(Local.Config())
    await engine.start(setup)
    await engine.stop()

print("main", hex(threading.get_ident()))
if sys.argv[2] == "started":
    asyncio.run(start())
else:
    torch.ones(1000, 1000) * 2
"""


@pytest.mark.parametrize("does", ["started", "computes"])
def test_the_start_leaves_no_openmp_threads_behind(does, tmp_path):
    """The main thread's would count for ever, and the trainer's then sleep between operations. OpenMP prints each thread of a
    team as it is made, the one that makes it with number 0."""
    folder = tmp_path / "model"
    new_model(folder, "qwen3", ModelSizes(hidden_size=256), alphabet="abc")
    environment = os.environ | {
        "OMP_NUM_THREADS": "2", "OMP_DISPLAY_AFFINITY": "TRUE", "OMP_AFFINITY_FORMAT": "team %i %n",
    }  # fmt: skip
    command = [sys.executable, "-c", STARTS, str(folder), does]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    lines = [line.split() for line in (ran.stdout + ran.stderr).splitlines() if line.strip()]
    (main,) = (line[1] for line in lines if line[0] == "main")
    makers = {line[1] for line in lines if line[0] == "team" and line[2] == "0"}
    assert makers
    assert (main in makers) == (does == "computes")

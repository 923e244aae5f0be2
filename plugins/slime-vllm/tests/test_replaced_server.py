"""A run with images whose server is killed continues with another one. Its servers are its own."""

import json

import PIL.Image
import pytest
from carried_run import events_of, metrics_of, slime, write_run
from vllm_setup import PYTHON

from slime_plugin_kit.tiny_vision import noise

pytestmark = pytest.mark.vllm

VANDAL = '''
"""Kills the server and all its processes when step 1 begins, while its requests run."""
import os, signal, threading
from pathlib import Path
import psutil
from slime_core.plugin import hook


@hook
def rollout_start(event):
    if event.rollout_id != 1:
        return
    children = psutil.Process().children(recursive=True)
    (server,) = [child.pid for child in children if child.cmdline()[1:3] == ["-m", "slime_vllm_server.launch"]]
    (event.run.run_dir / "killed").write_text(str(server))
    os.killpg(server, signal.SIGSTOP)
    threading.Timer(0.5, os.killpg, (server, signal.SIGKILL)).start()
'''


def write_images(folder, model):
    """Images that the vision tower gets smaller, as they are, with colors of a palette, and a prompt without one."""
    (folder / "small.png").write_bytes(noise(16, 24, 0).data)
    (folder / "large.png").write_bytes(noise(40, 37, 1).data)
    PIL.Image.open(folder / "small.png").convert("P").save(folder / "palette.png")
    names = ("small", "large", "palette", "small")
    rows = [{"prompt": f"{n}+<image>=", "images": [f"{name}.png"], "label": str(n)} for n, name in enumerate(names)]
    rows.append({"prompt": "1+1=", "label": "2"})
    rows.append({"prompt": "<image>+<image>=", "images": ["large.png", "small.png"], "label": "3"})
    write_run(folder, model)
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    text = (folder / "run.toml").read_text()
    media = 'label_key = "label", apply_chat_template = true, multimodal_keys = { image = "images" }'
    (folder / "run.toml").write_text(text.replace('label_key = "label"', media).replace("math", "random"))


def test_a_run_with_images_continues_with_another_server(vision_model, tmp_path):
    """From the step that it was in, with the weights of that step; nothing is left of features by older weights, though the
    images are the same in every step."""
    (tmp_path / "vandal.py").write_text(VANDAL)
    write_images(tmp_path, vision_model)
    words = ["--engine", "vllm", "--vllm-python", str(PYTHON), "--plugin", "vandal.py"]
    require_replaced(slime(tmp_path, *words))


def require_replaced(run):
    """Its server was killed by `VANDAL` in the second of three steps."""
    (lost,), (restarted,), (recovered,) = (
        events_of(run, f"engine_{what}") for what in ("lost", "restarted", "recovered")
    )
    killed = int((run / "killed").read_text())
    assert f"its process {killed} was killed by SIGKILL" in json.dumps(lost)
    assert restarted["pid"] != killed
    assert recovered["version"] == 1
    assert [row["rollout/staleness/max"] for row in metrics_of(run, "rollout/step")] == [0, 0, 0]
    steps = metrics_of(run, "train/step")
    assert len(steps) == 3
    assert all(step["train/train_rollout_logprob_abs_diff"] < 1e-5 for step in steps)
    assert min(step["train/grad_norm"] for step in steps) > 0

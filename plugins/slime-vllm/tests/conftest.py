"""One vLLM server for the whole session: it takes a minute to start. Tests attach to it as an external one."""

import asyncio
import json
import re
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import torch

from slime_models.new_model import ModelSizes, new_model
from slime_models.new_vision_model import VisionSizes, new_vision_model
from slime_plugin_kit.event_loop import BackgroundLoop
from slime_plugin_kit.tiny_model import buckets_of, load_plain, named_weights
from slime_serving.interpreter import program_in
from slime_vllm.plugin import Vllm
from slime_vllm.program import VLLM

# The suite is collected with importlib, which does not put its folder on the path.
sys.path.insert(0, str(Path(__file__).parent))

from addition import CHARACTERS, SIZES
from vllm_setup import PYTHON, setup_for


class Served:
    """A running server, without anything of ours in between."""

    def __init__(self, info, model, folder, engine, background):
        self.engine, self.run = engine, background.run
        """The engine that started it, whose calls run in another thread."""
        self.address, self.token, self.pid = info.address, info.token, info.pid
        self.model, self._folder = model, folder
        self.token_file = folder / "token"
        self.token_file.write_text(self.token)

    def ask(self, path, body=None, token=None):
        data = None if body is None else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {token or self.token}", "Content-Type": "application/json"}
        request = urllib.request.Request(self.address + path, data=data, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return response.status, json.loads(response.read() or b"null")
        except urllib.error.HTTPError as error:
            return error.code, None

    def renew(self):
        """The weights of the folder and the version of a start, no requests, no pause."""
        self.run(self._load_folder())
        self.ask("/update_weight_version", {"new_version": "default"})

    async def _load_folder(self):
        engine = self.attach()
        await engine.start(setup_for(self.model, self._folder))
        try:
            await engine.pause()
            await engine.load_bucket(*buckets_of(named_weights(load_plain(self.model, torch.float32)), 0, 1))
            await engine.resume()
        finally:
            await engine.stop()

    def attach(self, **options):
        """An engine, not started, on the server."""
        attached = {"external_engine_addrs": (self.address,), "external_engine_token_file": str(self.token_file)}
        return Vllm.build(Vllm.Config(**(attached | options)))

    async def until_generating(self, tokens=20):
        """Waits until it has generated so many more tokens."""
        enough = self.generated() + tokens
        while self.generated() < enough:  # noqa: ASYNC110 - the server has no event for it
            await asyncio.sleep(0.01)

    def generated(self):
        request = urllib.request.Request(self.address + "/metrics", headers={"Authorization": f"Bearer {self.token}"})
        with urllib.request.urlopen(request, timeout=60) as response:
            text = response.read().decode()
        return sum(
            float(count) for count in re.findall(r"^vllm:generation_tokens_total\{.*\} (\S+)$", text, re.MULTILINE)
        )


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: item.path.name == "test_lost_servers.py")


def pytest_terminal_summary(terminalreporter, config):
    if config.getoption("every_test_runs"):
        terminalreporter.section("engines")
        terminalreporter.line(f"{program_in(str(PYTHON), VLLM)} {sys.version}")


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """With tied embeddings: vLLM's head is a parameter of its own. Runs with other weights of these sizes attach too."""
    folder = tmp_path_factory.mktemp("model") / "tied"
    new_model(folder, "qwen3", SIZES, alphabet=CHARACTERS, seed=3, initializer_range=0.3)
    return folder


@pytest.fixture(scope="session")
def vision_model(tmp_path_factory):
    """A Qwen3-VL with heads of 32 elements."""
    folder = tmp_path_factory.mktemp("model") / "vision"
    sizes = ModelSizes(hidden_size=64, num_layers=3, num_heads=2, num_kv_heads=1, intermediate_size=64, max_length=256)
    vision = VisionSizes(
        hidden_size=64, num_layers=2, num_heads=2, intermediate_size=48, patch_size=4, max_pixels=24 * 24
    )
    new_vision_model(folder, sizes, vision, alphabet=CHARACTERS, seed=3, initializer_range=0.3)
    return folder


@pytest.fixture(scope="session")
def served(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    background = BackgroundLoop()
    engine = Vllm.build(Vllm.Config(python=str(PYTHON), start_timeout=580, health_timeout=5))
    try:
        yield Served(
            background.run(engine.start(setup_for(model, folder, max_batch=128))), model, folder, engine, background
        )
    finally:
        background.run(engine.stop())
        background.close()


@pytest.fixture
def attached(served, model, tmp_path):
    """`async with attached() as engine`: an engine on the server, with these options."""

    class Attached:
        def __init__(self, **options):
            self.options = options

        async def __aenter__(self):
            self.engine = served.attach(**self.options)
            await self.engine.start(setup_for(model, tmp_path))
            return self.engine

        async def __aexit__(self, *failure):
            await self.engine.stop()

    return Attached

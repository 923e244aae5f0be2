"""Two vLLM servers for the whole session, which start side by side: it takes a minute. Tests attach to the first as an external
one, or to both."""

import secrets
import sys
from pathlib import Path

import pytest

from slime_models.new_model import ModelSizes, new_model
from slime_models.new_vision_model import VisionSizes, new_vision_model
from slime_plugin_kit.event_loop import BackgroundLoop
from slime_serving.interpreter import program_in
from slime_vllm.plugin import Vllm
from slime_vllm.program import VLLM

# The suite is collected with importlib, which does not put its folder on the path.
sys.path.insert(0, str(Path(__file__).parent))

from addition import CHARACTERS, SIZES
from served import Served, begun_early
from vllm_setup import PYTHON, setup_for


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
    engine = Vllm.build(Vllm.Config(python=str(PYTHON), servers=2, start_timeout=580, health_timeout=5))
    token = secrets.token_urlsafe(24)
    try:
        with pytest.MonkeyPatch.context() as patched:
            # A run that attaches to both has one token.
            patched.setattr(secrets, "token_urlsafe", lambda size: token)
            setup = setup_for(model, folder, max_batch=128, num_devices=2)
            at_gate = background.run(begun_early(engine, setup))
            info = background.run(engine.start(setup))
        addresses = [server.address for server in engine._fleet.servers]
        yield Served(info, addresses, model, folder, engine, background, at_gate)
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

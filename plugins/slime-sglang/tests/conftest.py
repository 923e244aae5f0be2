"""One SGLang server for the whole session: it takes half a minute to start. Tests attach to it as an external one."""

import json
import re
import sys
import urllib.request
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path

import pytest

from slime_plugin_kit.event_loop import BackgroundLoop
from slime_plugin_kit.tiny_model import make_tiny_model
from slime_sglang.plugin import Sglang

# The suite is collected with importlib, which does not put its folder on the path.
sys.path.insert(0, str(Path(__file__).parent))

from engine_setup import setup_for
from sent_weights import Ranks


class Served:
    """A running server, without anything of ours in between."""

    def __init__(self, info, model, log):
        self.address, self.token, self.model, self.pid, self.log = info.address, info.token, model, info.pid, log

    def ask(self, path, body=None):
        data = None if body is None else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {self.token}", "Content-Type": "application/json"}
        request = urllib.request.Request(self.address + path, data=data, headers=headers)
        with urllib.request.urlopen(request, timeout=60) as response:
            content = response.read()
        return json.loads(content) if content.startswith((b"{", b"[")) else content.decode()

    def renew(self):
        """The weights of the folder, no requests, no pause, as after a start."""
        self.ask("/continue_generation", {})
        self.ask("/abort_request", {"abort_all": True})
        body = {"model_path": str(self.model), "weight_version": "default", "flush_cache": False}
        self.ask("/update_weights_from_disk", body)

    @property
    def options(self):
        path = self.log.parent / "token"
        path.write_text(self.token)
        return {
            "external_engine_addrs": (self.address,),
            "external_engine_token_file": str(path),
            "control_timeout": 60.0,
        }


def pytest_terminal_summary(terminalreporter, config):
    if not config.getoption("every_test_runs"):
        return
    terminalreporter.section("engines")
    for name in ("sglang", "sglang-router", "torch", "transformers", "ray"):
        terminalreporter.line(f"{name} {version(name)}")
    logs = list(Path(config._tmp_path_factory.getbasetemp()).rglob("sglang-*.log"))
    prefills = [count for log in logs for count in re.findall(r"#new-seq: (\d+)", log.read_text(errors="replace"))]
    terminalreporter.line(f"{len(logs)} servers and routers, {sum(map(int, prefills))} requests served")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def served(tiny, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("run")
    background = BackgroundLoop()
    engine = Sglang.build(Sglang.Config(start_timeout=240))
    try:
        info = background.run(engine.start(setup_for(tiny, run_dir, transport="delta")))
        yield Served(info, tiny, run_dir / "logs" / "sglang-0-0.log")
    finally:
        background.run(engine.stop())
        background.close()


@pytest.fixture
def attached(served, tmp_path):
    """`attached(**options)`: an engine, not started, on the server, whose weights are those of the folder."""

    def build(**options):
        served.renew()
        return Sglang.build(Sglang.Config(**(served.options | options)))

    return build


@pytest.fixture
def stack():
    with ExitStack() as entered:
        yield entered


@pytest.fixture
def ranks(stack, tmp_path):
    def build(driver, **options):
        built = Ranks(driver, tmp_path, **options)
        stack.callback(built.sender.close)
        return built

    return build

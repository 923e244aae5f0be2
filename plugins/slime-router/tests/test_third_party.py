"""A stranger's middleware is installed from its wheel and used by name."""

import asyncio
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from router_fake_engine import FakeSglang

SOURCE = Path(__file__).parent / "third_party" / "acme-middleware"

ROUTER = """
import asyncio, json, sys
import aiohttp, uvicorn, socket
from slime_router.server.app import RouterApp
from slime_router.server.cli import bind_middlewares
from slime_router.server.settings import Settings
from slime_router.server.upstreams import Upstreams

async def main():
    settings = Settings()
    parts = bind_middlewares(["load_balance", '{ name = "acme_prefer", engine = 1 }'])
    app = RouterApp(Upstreams(sys.argv[1:], settings), parts, settings).asgi()
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="on"))
    task = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started:
        await asyncio.sleep(0.01)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    async with aiohttp.ClientSession() as session:
        for _ in range(3):
            async with session.post(url + "/generate", json={"input_ids": [1]}) as response:
                assert response.status == 200
        async with session.get(url + "/metrics") as response:
            text = await response.text()
    server.should_exit = True
    await task
    print(json.dumps([line for line in text.splitlines() if "acme_prefer" in line]))

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder for PYTHONPATH, as if the wheel were installed beside slime; without a package index."""
    work = tmp_path_factory.mktemp("acme")
    # A copy, so that the build leaves nothing in the checkout.
    copy = shutil.copytree(SOURCE, work / "source", ignore=shutil.ignore_patterns("__pycache__"))
    (work / "wheels").mkdir()
    build = "import sys; from hatchling.build import build_wheel; build_wheel(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, str(work / "wheels")], cwd=copy, check=True, capture_output=True)
    (wheel,) = (work / "wheels").glob("*.whl")
    if importlib.util.find_spec("pip") is not None:
        installer = [sys.executable, "-m", "pip", "install"]
    else:
        uv = shutil.which("uv")
        assert uv is not None, "neither pip nor uv is there to install a wheel"
        installer = [uv, "pip", "install"]
    options = ["--no-deps", "--no-index", "--target", str(work / "site"), str(wheel)]
    subprocess.run([*installer, *options], check=True, capture_output=True)
    return work / "site"


async def test_it_is_used_by_name(installed):
    async with FakeSglang() as one, FakeSglang() as other:
        env = {**os.environ, "PYTHONPATH": str(installed)}
        command = [sys.executable, "-c", ROUTER, one.url, other.url]
        process = await asyncio.create_subprocess_exec(
            *command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        out, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0, err.decode()
    assert (len(one.seen), len(other.seen)) == (0, 3)
    assert json.loads(out) == ['slime_router_middleware{counter="preferred",middleware="acme_prefer",place="0"} 3.0']

"""Fake engines, a router in front of them, and the requests of tests."""

import asyncio
import socket
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
import uvicorn
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from slime_router.server.app import RouterApp
from slime_router.server.cli import bind_middlewares
from slime_router.server.settings import Settings
from slime_router.server.upstreams import Upstreams

# The suite is collected with importlib, which does not put its folder on the path.
sys.path.insert(0, str(Path(__file__).parent))

from router_fake_engine import FakeSglang


class Router:
    """A client of a router that runs in this event loop."""

    def __init__(self, session, url, upstreams):
        self.session, self.url, self.upstreams = session, url, upstreams

    async def post(self, body, path="/generate", **options):
        async with self.session.post(self.url + path, json=body, **options) as response:
            data = await response.read()
            return response.status, data, response.headers

    async def generate(self, body, **options):
        async with self.session.post(self.url + "/generate", json=body, **options) as response:
            assert response.status == 200, await response.text()
            return await response.json()

    async def get(self, path, **options):
        async with self.session.get(self.url + path, **options) as response:
            return response.status, await response.read()

    async def counter(self, line):
        """The value of one line of /metrics."""
        _, text = await self.get("/metrics")
        found = [one.rpartition(" ") for one in text.decode().splitlines()]
        (value,) = [float(number) for name, _, number in found if name == line]
        return value


@asynccontextmanager
async def routed(*upstreams, middlewares=(), **settings):
    known = Settings(**{"health_interval_s": 60.0, **settings})
    places = Upstreams([getattr(upstream, "url", upstream) for upstream in upstreams], known)
    app = RouterApp(places, bind_middlewares(list(middlewares)), known).asgi()
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, http="httptools", log_level="warning", lifespan="on"))
    task = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started:  # noqa: ASYNC110 - uvicorn reports it in no other way
        await asyncio.sleep(0.005)
    try:
        async with aiohttp.ClientSession() as session:
            yield Router(session, f"http://127.0.0.1:{listener.getsockname()[1]}", places)
    finally:
        server.should_exit = True
        await task


@pytest.fixture
def route():
    return routed


@pytest.fixture
async def engine():
    async with FakeSglang() as one:
        yield one


@pytest.fixture
async def engines():
    async with FakeSglang() as one, FakeSglang() as other:
        yield one, other


PIECES = ["<end>", "42", *"0123456789", *"+=? "]


@pytest.fixture(scope="session")
def characters(tmp_path_factory):
    """A folder with a tokenizer: a token for each character, and one for "42", so that an engine that writes 4 and 2 is
    tokenized otherwise. A token's id is its place in PIECES."""
    tokenizer = Tokenizer(models.WordLevel({piece: number for number, piece in enumerate(PIECES)}, unk_token="<end>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("42|."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    folder = tmp_path_factory.mktemp("characters")
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder

"""The real server, in the tests' event loop."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from slime_search_r1.server.app import create_app
from slime_search_r1.server.index import Index
from slime_search_r1.server.serve import BACKLOG, server_of
from slime_serving.listener import listen

# The suite is collected with importlib, which does not put its folder on the path.
sys.path.insert(0, str(Path(__file__).parent))

from retrieval_servers import DOCUMENTS, TOKEN


@pytest.fixture(scope="session")
def index() -> Index:
    return Index(DOCUMENTS)


@pytest.fixture
async def served(index: Index) -> AsyncIterator[str]:
    """Address of a retrieval server in this event loop."""
    listener = listen("127.0.0.1", 0, backlog=BACKLOG)
    server = server_of(create_app(index, TOKEN))
    running = asyncio.create_task(server.serve(sockets=[listener]))
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    server.should_exit = True
    await running

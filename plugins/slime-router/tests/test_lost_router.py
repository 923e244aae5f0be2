"""The process slime-router, killed and stopped while it has requests."""

import asyncio
import signal
import sys
from contextlib import asynccontextmanager

import aiohttp
import psutil
import pytest

COMMAND = [sys.executable, "-c", "from slime_router.server.cli import main; main()"]
SOON = aiohttp.ClientTimeout(total=120)


def ask(session, rid):
    async def response():
        async with session.post("/generate", json={"rid": rid, "input_ids": [5, 6, 7]}) as got:
            return got.status, (await got.json())["output_ids"]

    return asyncio.create_task(response())


async def until(reached):
    while not reached():  # noqa: ASYNC110 - what another process does reports itself in no other way
        await asyncio.sleep(0.01)


@asynccontextmanager
async def started(folder, upstream, port=0):
    """The process, and a session of a caller with its token."""
    words = ["--port", str(port), "--upstream", upstream.url, "--middleware", "retry", "--middleware", "priority"]
    process = await asyncio.create_subprocess_exec(*COMMAND, *words, cwd=folder, stdout=asyncio.subprocess.PIPE)
    try:
        line = (await asyncio.wait_for(process.stdout.readline(), 120)).decode()
        address = line.split("listens on ")[1].split(",")[0]
        headers = {"authorization": f"Bearer {(folder / 'slime-router.token').read_text().strip()}"}
        async with aiohttp.ClientSession(address, headers=headers, timeout=SOON) as session:
            yield process, session
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_a_router_that_is_killed_fails_its_requests_at_once_and_the_engine_drops_them(engine, tmp_path):
    engine.hold.clear()
    async with started(tmp_path, engine) as (process, session):
        asked = [ask(session, rid) for rid in ("a", "b")]
        await until(lambda: len(engine.seen) == 2)
        process.kill()
        await asyncio.wait(asked)
        await process.wait()
        for one in asked:
            with pytest.raises(aiohttp.ClientConnectionError):
                one.result()
        # Else the engine would generate a response without a reader.
        await until(lambda: len(engine.gone) == 2)
        with pytest.raises(aiohttp.ClientConnectorError):
            await ask(session, "c")
        port = session._base_url.port
    engine.hold.set()
    # The same command listens at the same address, with the same token.
    async with started(tmp_path, engine, port) as (_, again):
        assert again.headers == session.headers
        assert await ask(again, "a") == (200, [1, 2, 9])


async def test_a_router_that_is_stopped_responds_when_it_continues(engine, tmp_path):
    engine.hold.clear()
    async with started(tmp_path, engine) as (process, session):
        before = ask(session, "before")
        await until(lambda: len(engine.seen) == 1)
        process.send_signal(signal.SIGSTOP)
        await until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED)
        meanwhile = ask(session, "meanwhile")
        # Only a time limit of the caller's own ends what it asks now.
        with pytest.raises(TimeoutError):
            await session.get("/health", timeout=aiohttp.ClientTimeout(total=0.5))
        engine.hold.set()
        assert not before.done()
        assert len(engine.seen) == 1
        process.send_signal(signal.SIGCONT)
        assert await asyncio.gather(before, meanwhile) == [(200, [1, 2, 9])] * 2
        assert engine.gone == []

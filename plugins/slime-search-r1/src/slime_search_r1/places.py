"""The retrieval server: one at a given address, or a process that the run starts."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import sys
from pathlib import Path
from typing import Final

import httpx

from slime_core.errors import PluginError
from slime_search_r1.searches import Address

START_LIMIT_S: Final = 1800.0
"""Limit for reading and indexing the corpus."""
END_LIMIT_S: Final = 5.0
HEALTH_S: Final = 10.0


class GivenServer:
    """A server that the user started."""

    def __init__(self, url: str, token: str | None) -> None:
        self._address = Address(url, token)

    async def address(self) -> Address:
        return self._address

    async def examine(self, asked: Address) -> None: ...

    async def close(self) -> None: ...


class OwnServer:
    """A server that is started at the first search, on a free port of the loopback, with a token that only this process
    knows. It is started again if it has died or hangs, and ends with the run, or when this process ends."""

    def __init__(self, corpus: Path) -> None:
        self._corpus = corpus
        self._process: asyncio.subprocess.Process | None = None
        self._address: Address | None = None
        self._starting = asyncio.Lock()

    async def address(self) -> Address:
        async with self._starting:
            if self._process is None or self._process.returncode is not None:
                self._address = await self._start()
            assert self._address is not None
            return self._address

    async def examine(self, asked: Address) -> None:
        """Kills the server if it does not even respond to /health; the next search starts another."""
        async with self._starting:
            process = self._process
            if process is None or process.returncode is not None or asked != self._address:
                return
            try:
                async with httpx.AsyncClient(timeout=HEALTH_S, trust_env=False) as client:
                    await client.get(f"{asked.url}/health")
            except httpx.HTTPError:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()

    async def close(self) -> None:
        if self._process is None or self._process.returncode is not None:
            return
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            await asyncio.wait_for(self._process.wait(), END_LIMIT_S)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()

    async def _start(self) -> Address:
        """PluginError if it does not start."""
        token = secrets.token_urlsafe(32)
        self._process = process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "slime_search_r1.server.child", str(self._corpus)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            # Ctrl-C must reach only the run, which ends the server after its last search.
            start_new_session=True,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        line = b""
        # The process may end before it reads; then it has printed why.
        with contextlib.suppress(ConnectionError):
            process.stdin.write(token.encode() + b"\n")
            await process.stdin.drain()
        try:
            async with asyncio.timeout(START_LIMIT_S):
                line = await process.stdout.readline()
        except TimeoutError:
            process.kill()
            raise PluginError(
                f"generate.corpus = {self._corpus}: no index after {START_LIMIT_S:g} s. Start `slime-retrieval serve` "
                "before the run, and set its address: generate.search_url."
            ) from None
        started = json.loads(line) if line else {"error": "the retrieval server ended without a message; see above"}
        if "error" in started:
            await process.wait()
            raise PluginError(f"generate.corpus: {started['error']}")
        return Address(f"http://127.0.0.1:{started['port']}", token)

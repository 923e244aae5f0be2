"""The generator `external_agents`: posts a prompt to the queue, and waits until an agent returns its trajectory."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from slime_buffer_service.app import BufferApp
from slime_buffer_service.config import ExternalAgentsConfig
from slime_buffer_service.prompt_queue import Lease, PromptQueue
from slime_core.contracts.generator import Episode, Generator
from slime_core.rollout.single_turn import SingleTurn
from slime_core.types.sample import Sample, Status
from slime_serving.in_loop import InLoopServer
from slime_serving.listener import listen, shown
from slime_serving.token_file import token_from

BACKLOG: Final = 1024


class ExternalAgents(Generator):
    """Generator whose responses come from agents. Its server runs from `open` to `close`."""

    def __init__(self, config: ExternalAgentsConfig) -> None:
        self._config = config
        self._queue = PromptQueue(lease_s=config.lease_s, max_leased=config.max_leased)
        self._policy = SingleTurn()
        self._starting = asyncio.Lock()
        self._server: InLoopServer | None = None
        self.url = ""

    async def open(self) -> None:
        async with self._starting:
            if self._server is None:
                await self._start()

    async def generate(self, episode: Episode) -> Sequence[Sample]:
        await self.open()
        started = episode.trajectory()
        room = episode.sampling.max_new_tokens
        if episode.max_context_len is not None:
            room = min(room, episode.max_context_len - len(episode.prompt.token_ids))
        room -= started.response_length
        if room <= 0:
            return [started.finish(status=Status.TRUNCATED)]
        purpose = "eval" if episode.evaluation else "train"
        ticket = self._queue.post(f"{purpose}-{started.index}", episode, room=room, kept=episode.kept)
        stopped: asyncio.Future[None] = asyncio.ensure_future(episode.stopped())
        try:
            if not await self._taken_in_time(ticket, stopped):
                self._queue.end(ticket, "the policy has responded itself: no agent fetched the prompt in time")
                return await self._policy.generate(episode)
            ends: list[asyncio.Future[Any]] = [ticket.response, stopped]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if ticket.response.done():
                return [ticket.response.result()]
            return [started.finish(status=Status.ABORTED)]
        finally:
            stopped.cancel()
            self._queue.end(ticket, "the run has aborted this response")

    async def close(self) -> None:
        if self._server is not None:
            await self._server.close()
            self._server = None

    async def _taken_in_time(self, ticket: Lease, stopped: asyncio.Future[None]) -> bool:
        """Whether an agent fetched the prompt within `policy_after_s`, or the rollouts ended before."""
        if self._config.policy_after_s is None:
            return True
        taken = asyncio.ensure_future(ticket.taken.wait())
        ends: list[asyncio.Future[Any]] = [taken, stopped]
        try:
            done, _ = await asyncio.wait(ends, timeout=self._config.policy_after_s, return_when=asyncio.FIRST_COMPLETED)
            return bool(done)
        finally:
            taken.cancel()

    async def _start(self) -> None:
        config = self._config
        listener = listen(config.host, config.port, backlog=BACKLOG)
        with contextlib.ExitStack() as undo:
            undo.callback(listener.close)
            token = token_from(Path(config.token_file), create=True)
            app = BufferApp(self._queue, max_body_bytes=config.max_body_bytes, give_labels=config.give_labels)
            self._server = InLoopServer(app.asgi(token))
            await self._server.start(listener)
            undo.pop_all()
        self.url = shown(listener, config.host)
        print(f"external_agents: {self.url}, token in {config.token_file}", flush=True)

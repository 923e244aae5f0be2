"""ActorGroup: actors whose calls wait for each other, and how a failure of one ends the calls of all.

What an actor raises reaches the caller as the same error with the same text, chained to Ray's, which has the worker's
traceback. An actor that is gone is an error of its own, with its node, pid and the end of its log, also in place of what
other ranks raise because of it. After that, or when one rank raised and another still waits for it, no call of the group is
awaited any more. A refused request is no failure.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from slime_core.errors import EngineRefused, SlimeError
from slime_ray.actors import Location, StartedProcess
from slime_ray.process_end import end_on

T = TypeVar("T")

LOG_LINES: Final = 20
GRACE_AFTER_FAILURE_S: Final = 2.0
"""The others may wait for the one that failed, and then never end."""
NOTICE_S: Final = 10.0
"""In which Ray reports that a process has died. A collective fails in the other ranks before."""


@dataclass(slots=True, kw_only=True)
class Member:
    """An actor with its name and location."""

    actor: Any
    name: str
    failure: type[SlimeError]
    """Class of the error that its death raises."""
    location: Location | None = None
    servers: Sequence[StartedProcess] | None = None
    """The processes that serve for an engine, and may end after its own; None until it has started."""

    @property
    def actor_id(self) -> str:
        actor_id: str = self.actor._ray_actor_id.hex()
        return actor_id

    @property
    def is_here(self) -> bool:
        """Whether its process is, or was, on this machine."""
        return self.location is not None and self.location.node == ray.get_runtime_context().get_node_id()

    async def require_end(self) -> None:
        """Kills its process, which may hang and then does not respond to Ray, and its servers'. Raises its error if they have
        not ended in time."""
        if self.location is None:
            return
        where = f"{self.name} (node {self.location.ip}, pid {self.location.pid})"
        try:
            left = await end_on(self.location, self.servers or (), here=self.is_here)
        except (TimeoutError, RayError) as error:
            raise self.failure(
                f"{where}: its machine has not reported whether it has ended: {error or 'no response'}"
            ) from error
        if left:
            self.servers = (*(self.servers or ()), *left)
            pids = ", ".join(str(process.pid) for process in left)
            raise self.failure(
                f"{where}: it was killed, but processes {pids} have not ended. Their memory is not free."
            )

    def died(self, reason: str) -> SlimeError:
        """Names node and pid, and quotes the log if it is on this machine."""
        if self.location is None:
            return self.failure(f"{self.name} did not start: {reason}")
        where = f"{self.name} (node {self.location.ip}, pid {self.location.pid})"
        return self.failure(f"{where} is gone: {reason}{last_words(self.location.log)}")


@dataclass(slots=True, kw_only=True)
class Roster:
    """All actors of a run, by Ray's id: an error may name another than the one that was called."""

    members: dict[str, Member] = field(default_factory=dict)

    def explain(self, error: RayError, called: Member) -> Exception:
        """The error that the caller sees: the worker's own, or that its process has died."""
        if isinstance(error, RayTaskError):
            cause = error.cause
            # The argument is the result of another call, which failed: raise the error of that call.
            return self.explain(cause, called) if isinstance(cause, RayError) else cause
        if isinstance(error, RayActorError):
            return self.members.get(error.actor_id or "", called).died(reason_of(error))
        return called.failure(f"{called.name}: {error}")


class ActorGroup:
    """Members whose calls wait for each other. `run` awaits a call on a member; `end` is called once."""

    def __init__(self, roster: Roster, *, grace_s: float, shutdown_method: str) -> None:
        """`shutdown_method`: the method by which a member ends by itself, within `grace_s` seconds."""
        self._roster = roster
        self._grace_s = grace_s
        self._shutdown_method = shutdown_method
        self._members: list[Member] = []
        self._pending: dict[asyncio.Future[Any], tuple[Member, str]] = {}
        self._lost: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
        self._ready = False
        self._has_failed = False
        self.ended = False

    @property
    def has_died(self) -> bool:
        return self._lost.done()

    def add(self, member: Member) -> None:
        self._members.append(member)
        self._roster.members[member.actor_id] = member

    def ready(self) -> None:
        """All members hold a worker: from now on `end` lets them end by themselves."""
        self._ready = True

    async def run(self, member: Member, work: Awaitable[T], call: str = "") -> T:
        """The result of a call on a member; any failure as described above. `call`: its name; only other members in the same
        call wait for this one."""
        task: asyncio.Future[T] = asyncio.ensure_future(work)
        self._pending[task] = member, call
        try:
            both: set[asyncio.Future[Any]] = {task, self._lost}
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise self._lost.result()
            return task.result()
        except RayError as error:
            failure = self._roster.explain(error, member)
            del self._pending[task]
            if isinstance(error, RayTaskError) and not isinstance(failure, SlimeError):
                failure = await self._death_beside(member, call) or failure
            self._note(failure, error, member, call)
            raise failure from error
        finally:
            self._pending.pop(task, None)
            task.cancel()

    async def end(self, *, failed: bool = False) -> None:
        """Lets members end by themselves if they can, then kills them. Raises the error of a shutdown call, unless members have
        `failed` or a call has failed before: then that error was raised."""
        self.ended = True
        failed_before = failed or self._has_failed
        shutdowns = []
        if self._ready and not self._lost.done():
            shutdowns = [
                asyncio.ensure_future(self.run(member, member.actor.call.remote(self._shutdown_method)))
                for member in self._members
            ]
        grace_s = min(self._grace_s, GRACE_AFTER_FAILURE_S) if failed_before else self._grace_s
        try:
            if shutdowns:
                await asyncio.wait(shutdowns, timeout=grace_s)
        finally:
            # Also if this is cancelled: nothing would wait for the calls then.
            for member in self._members:
                ray.kill(member.actor)
            for call in shutdowns:
                call.cancel()
            if failed:
                # Other members take their places. Those of a run that ends stay: errors may still name them.
                for member in self._members:
                    self._roster.members.pop(member.actor_id, None)
        results = await asyncio.gather(*shutdowns, return_exceptions=True)
        # Ray asks a process to kill itself; one that hangs does not.
        hanging = [member for member, call in zip(self._members, shutdowns, strict=False) if call.cancelled()]
        await together([member.require_end() for member in hanging])
        for result in results:
            if isinstance(result, Exception) and not failed_before:
                raise result

    async def _death_beside(self, member: Member, call: str) -> Exception | None:
        """The error of another member that died in the same call: then a lost connection is all that this one knows."""
        deadline = asyncio.get_running_loop().time() + NOTICE_S
        beside = {task: of for task, (of, its) in self._pending.items() if its == call and of is not member}
        while True:
            for task, of in beside.items():
                if task.done() and not task.cancelled() and isinstance(died := task.exception(), RayActorError):
                    return self._roster.explain(died, of)
            left = deadline - asyncio.get_running_loop().time()
            waiting = [task for task in beside if not task.done()]
            if not waiting or left <= 0:
                return None
            await asyncio.wait(waiting, timeout=left, return_when=asyncio.FIRST_COMPLETED)

    def _note(self, failure: Exception, error: RayError, member: Member, call: str) -> None:
        if isinstance(failure, EngineRefused):
            # The engine is well.
            return
        self._has_failed = True
        if not isinstance(error, RayTaskError):
            self._lose(failure)
        elif waiting := frozenset(
            other for other, (of, its) in self._pending.items() if its == call and of is not member
        ):
            loop = asyncio.get_running_loop()
            loop.call_later(self._grace_s, self._lose_if_waiting, failure, waiting)

    def _lose_if_waiting(self, failure: Exception, waiting: frozenset[asyncio.Future[Any]]) -> None:
        if waiting & self._pending.keys():
            self._lose(failure)

    def _lose(self, failure: Exception) -> None:
        if not self._lost.done():
            self._lost.set_result(failure)


def reason_of(error: RayError) -> str:
    """The sentence of Ray's message that states the cause; the rest lists ids and guesses."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    message = next((line for line in reversed(lines) if line.startswith(("The actor is dead", "Worker exit"))), "")
    return (message or " ".join(lines)).partition(" Some common causes")[0]


def last_words(log: Path | None) -> str:
    """The end of a log on this machine, to be put after a message."""
    if log is None or not log.is_file():
        return ""
    lines = log.read_text(errors="replace").splitlines()[-LOG_LINES:]
    return "".join(f"\n  {line}" for line in [f"Last lines of {log}:", *lines]) if lines else ""


async def together(work: Sequence[Awaitable[T]]) -> list[T]:
    """All results; the first failure at once."""
    return list(await asyncio.gather(*work))

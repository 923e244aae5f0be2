"""The driver's side of actors: what the rest of the kernel calls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final

import ray

from slime_core.types.completion import Completion, GenerateRequest
from slime_ray.actor_group import ActorGroup, Member, together

ITEMS_AHEAD: Final = 2
"""How many streamed items an actor makes before the first of them is taken: shared memory holds this many buckets."""


OF_ALL: Final = frozenset({"health"})
"""What every machine of an engine is asked; the others are for the one that serves."""


class RayRank:
    """A rank in an actor."""

    def __init__(self, member: Member, actor_group: ActorGroup) -> None:
        self._member = member
        self._actor_group = actor_group

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return await self._actor_group.run(
            self._member, self._member.actor.call.remote(method, *args, **kwargs), method
        )

    async def stream(self, method: str, *args: Any) -> AsyncIterator[Any]:
        """References to items, in the order made; None for a None. Nothing but the count of items passes here."""
        options = {"num_returns": "streaming", "_generator_backpressure_num_objects": 2 * ITEMS_AHEAD}
        items = self._member.actor.stream.options(**options).remote(method, *args)
        while (is_something := await self._actor_group.run(self._member, next_value(items), method)) is not None:
            # Ray's asynchronous iteration fetches what it waits for; its blocking one does not.
            yield await asyncio.to_thread(next, items) if is_something else None


class RayEngine:
    """An engine in an actor, or in one on each of its machines."""

    def __init__(self, members: Sequence[Member], actor_group: ActorGroup) -> None:
        """`members`: the first one serves."""
        self._member, *self._beside = members
        self._actor_group = actor_group

    async def generate(self, requests: Sequence[GenerateRequest]) -> AsyncIterator[Completion]:
        responses = self._member.actor.generate.options(num_returns="streaming").remote(list(requests))
        exhausted = False
        try:
            while (
                completions := await self._actor_group.run(self._member, next_value(responses), "generate")
            ) is not None:
                for completion in completions:
                    yield completion
            exhausted = True
        finally:
            if not exhausted and not self._actor_group.ended:
                ray.cancel(responses)

    async def call(self, method: str, *args: Any) -> Any:
        asked = [self._member, *(self._beside if method in OF_ALL else ())]
        calls = [member.actor.call.remote(method, *args) for member in asked]
        run = self._actor_group.run
        try:
            responses = await together([run(*call, method) for call in zip(asked, calls, strict=True)])
        except asyncio.CancelledError:
            # As where the engine shares this process: else it loads an adapter, for example, that nothing drops.
            if not self._actor_group.ended:
                for call in calls:
                    ray.cancel(call)
            raise
        return responses[0]


async def next_value(items: Any) -> Any:
    """The value of a stream's next reference; None at its end."""
    reference = await anext(items, None)
    return None if reference is None else await reference

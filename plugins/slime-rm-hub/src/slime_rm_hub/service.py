"""Service: what scores over HTTP, asked again with growing pauses until it answers or the time is over."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import aiohttp

from slime_core.contracts.reward import Outcome, RewardFailure
from slime_core.errors import ConfigError
from slime_rm_hub.config import LONGEST_PAUSE_S, AskingConfig

SHOWN: Final = 200
"""Characters of an unexpected answer."""
BUSY: Final = 429


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One of its addresses."""

    url: str
    token: str | None = field(default=None, repr=False)
    """Bearer token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """`timeout_s` and `tries` are of one request; `concurrency` bounds those in flight from one worker process."""

    places: tuple[Place, ...]
    """Requests go to them in turn, and the next try of one to the next place."""
    timeout_s: float
    tries: int
    concurrency: int
    first_pause_s: float = 1.0

    @classmethod
    def from_config(cls, config: AskingConfig, places: tuple[Place, ...]) -> Service:
        return cls(
            places=places,
            timeout_s=config.request_timeout,
            tries=config.tries,
            concurrency=config.concurrency,
            first_pause_s=config.first_pause,
        )

    @property
    def name(self) -> str:
        """For messages about an answer, which may come from any of its places."""
        return self.places[0].url

    def under(self, path: str) -> Service:
        """The same, at a path of its places."""
        return replace(self, places=tuple(replace(place, url=place.url + path) for place in self.places))

    def ask(self, bodies: Sequence[Mapping[str, Any]]) -> list[Any]:
        """The JSON that answers each request, or a RewardFailure."""
        return asyncio.run(self._ask_all(bodies))

    async def _ask_all(self, bodies: Sequence[Mapping[str, Any]]) -> list[Any]:
        limit = asyncio.Semaphore(self.concurrency)
        timeout = aiohttp.ClientTimeout(total=self.timeout_s)
        # What stands in the environment is for the user's browser; a reward service is named in the run file.
        async with aiohttp.ClientSession(timeout=timeout, trust_env=False) as session:

            async def within(work: Coroutine[Any, Any, Any]) -> Any:
                async with limit:
                    return await work

            # Workers know nothing of each other: each begins somewhere.
            first = random.randrange(len(self.places))
            return await asyncio.gather(
                *(within(self._ask(session, body, number)) for number, body in enumerate(bodies, start=first))
            )

    async def _ask(self, session: aiohttp.ClientSession, body: Mapping[str, Any], first: int) -> Any:
        for number in range(self.tries):
            answer = await self._try(session, body, self.places[(first + number) % len(self.places)])
            if not isinstance(answer, RewardFailure) or answer.outcome is Outcome.WRONG or number + 1 == self.tries:
                break
            # The jitter keeps those that failed together from coming back together.
            await asyncio.sleep(min(self.first_pause_s * (2**number + random.random()), LONGEST_PAUSE_S))
        if isinstance(answer, RewardFailure) and answer.outcome is not Outcome.WRONG:
            return RewardFailure(answer.outcome, f"{answer.message}, after {self.tries} tries")
        return answer

    async def _try(self, session: aiohttp.ClientSession, body: Mapping[str, Any], place: Place) -> Any:
        """One request. `infra` and `timeout` may be tried again; what the service refuses it would refuse again."""
        headers = None if place.token is None else {"Authorization": f"Bearer {place.token}"}
        try:
            async with session.post(place.url, json=body, headers=headers) as response:
                if response.status >= 500 or response.status == BUSY:
                    return failure_of(place, Outcome.INFRA, f"answered {response.status} {await told(response)}")
                if response.status >= 400:
                    return failure_of(place, Outcome.WRONG, f"refused: {response.status} {await told(response)}")
                try:
                    return await response.json(content_type=None)
                except ValueError:
                    return failure_of(place, Outcome.INFRA, f"gave no JSON: {await told(response)}")
        except TimeoutError:
            return failure_of(place, Outcome.TIMEOUT, f"gave no answer within {self.timeout_s:g} s")
        except (aiohttp.ClientError, OSError) as error:
            return failure_of(place, Outcome.INFRA, f"cannot be asked: {type(error).__name__}: {error}")


def read_token(config: AskingConfig) -> str | None:
    """Returns the content of `token_file`, stripped. ConfigError if it cannot be read."""
    if config.token_file is None:
        return None
    try:
        return Path(config.token_file).read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ConfigError(f"reward.token_file = {str(config.token_file)!r}: cannot be read: {error}.") from error


def failure_of(place: Place, outcome: Outcome, text: str) -> RewardFailure:
    return RewardFailure(outcome, f"{place.url} {text}")


async def told(response: aiohttp.ClientResponse) -> str:
    text = " ".join((await response.text(errors="replace")).split())
    return text[:SHOWN] + ("…" if len(text) > SHOWN else "")

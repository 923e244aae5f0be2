"""Service: requests to a scoring service over HTTP, repeated with growing pauses."""

from __future__ import annotations

import asyncio
import json
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
"""Characters of an unexpected response that an error shows."""
BUSY: Final = 429
LARGEST_RESPONSE: Final = 2**20
"""Bytes of a response that are read; a larger one fails its sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One address of a service."""

    url: str
    token: str | None = field(default=None, repr=False)
    """Bearer token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """`timeout_s` and `tries` apply to one request; `concurrency` limits those in flight from one worker process."""

    places: tuple[Place, ...]
    """Requests are distributed round-robin, and each further try goes to the next place."""
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
        """Name of the service in errors: its first address."""
        return self.places[0].url

    def under(self, path: str) -> Service:
        """The same service with `path` appended to its addresses."""
        return replace(self, places=tuple(replace(place, url=place.url + path) for place in self.places))

    def ask(self, bodies: Sequence[Mapping[str, Any]]) -> list[Any]:
        """The JSON of the response to each request, or a RewardFailure."""
        return asyncio.run(self._ask_all(bodies))

    async def _ask_all(self, bodies: Sequence[Mapping[str, Any]]) -> list[Any]:
        limit = asyncio.Semaphore(self.concurrency)
        timeout = aiohttp.ClientTimeout(total=self.timeout_s)
        # The service in the run file is reached directly, without the environment's proxies.
        # Nothing is decompressed: a small response could become a large one.
        plain = {"Accept-Encoding": "identity"}
        async with aiohttp.ClientSession(
            timeout=timeout, trust_env=False, headers=plain, auto_decompress=False
        ) as session:

            async def within(work: Coroutine[Any, Any, Any]) -> Any:
                async with limit:
                    return await work

            # A random first place for each worker distributes their requests.
            first = random.randrange(len(self.places))
            return await asyncio.gather(
                *(within(self._ask(session, body, number)) for number, body in enumerate(bodies, start=first))
            )

    async def _ask(self, session: aiohttp.ClientSession, body: Mapping[str, Any], first: int) -> Any:
        for number in range(self.tries):
            answer = await self._try(session, body, self.places[(first + number) % len(self.places)])
            if not isinstance(answer, RewardFailure) or answer.outcome is Outcome.WRONG or number + 1 == self.tries:
                break
            # The jitter spreads requests that failed at the same time.
            await asyncio.sleep(min(self.first_pause_s * (2**number + random.random()), LONGEST_PAUSE_S))
        if isinstance(answer, RewardFailure) and answer.outcome is not Outcome.WRONG:
            return RewardFailure(answer.outcome, f"{answer.message}, after {self.tries} tries")
        return answer

    async def _try(self, session: aiohttp.ClientSession, body: Mapping[str, Any], place: Place) -> Any:
        """Sends one request. Failures `infra` and `timeout` may be retried; a refused request (`wrong`) may not."""
        headers = None if place.token is None else {"Authorization": f"Bearer {place.token}"}
        try:
            async with session.post(place.url, json=body, headers=headers) as response:
                answer = await read_body(response)
                if response.status >= 500 or response.status == BUSY:
                    return failure_of(place, Outcome.INFRA, f"returned status {response.status} {text_of(answer)}")
                if response.status >= 400:
                    return failure_of(place, Outcome.WRONG, f"refused: status {response.status} {text_of(answer)}")
                if len(answer) > LARGEST_RESPONSE:
                    return failure_of(place, Outcome.WRONG, f"returned more than {LARGEST_RESPONSE} bytes")
                try:
                    return json.loads(answer)
                except ValueError:
                    return failure_of(place, Outcome.INFRA, f"returned no JSON: {text_of(answer)}")
                except RecursionError:
                    return failure_of(place, Outcome.WRONG, f"returned JSON that is nested too deep: {text_of(answer)}")
        except TimeoutError:
            return failure_of(place, Outcome.TIMEOUT, f"sent no response within {self.timeout_s:g} s")
        except (aiohttp.ClientError, OSError) as error:
            return failure_of(place, Outcome.INFRA, f"cannot be reached: {type(error).__name__}: {error}")


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


async def read_body(response: aiohttp.ClientResponse) -> bytes:
    """The body; of a larger one than LARGEST_RESPONSE a part that is larger, too."""
    body = bytearray()
    async for piece in response.content.iter_any():
        body += piece
        if len(body) > LARGEST_RESPONSE:
            # What is left is not read: the connection cannot be used again.
            response.close()
            break
    return bytes(body)


def text_of(body: bytes) -> str:
    text = " ".join(body[: 8 * SHOWN].decode(errors="replace").split())
    return text[:SHOWN] + ("…" if len(text) > SHOWN else "")

"""Service: one HTTP endpoint that scores, asked again with growing pauses until it answers or the time is over."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import aiohttp

from slime_core.contracts.reward import Outcome, RewardFailure
from slime_core.errors import ConfigError

LONGEST_PAUSE_S: Final = 30.0
SHOWN: Final = 200
"""Characters of an unexpected answer."""
BUSY: Final = 429


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """`timeout_s` and `tries` are of one request; `concurrency` bounds those in flight from one worker process."""

    url: str
    timeout_s: float
    tries: int
    concurrency: int
    token_file: Path | None = None
    first_pause_s: float = 1.0
    headers: Mapping[str, str] = field(default_factory=dict)

    def ask(self, bodies: Sequence[Mapping[str, Any]]) -> list[Any]:
        """The JSON that answers each request, or a RewardFailure."""
        return asyncio.run(self._ask_all(bodies))

    async def _ask_all(self, bodies: Sequence[Mapping[str, Any]]) -> list[Any]:
        limit = asyncio.Semaphore(self.concurrency)
        timeout = aiohttp.ClientTimeout(total=self.timeout_s)
        # What stands in the environment is for the user's browser; a reward service is named in the run file.
        async with aiohttp.ClientSession(timeout=timeout, headers=self._headers(), trust_env=False) as session:

            async def within(work: Coroutine[Any, Any, Any]) -> Any:
                async with limit:
                    return await work

            return await asyncio.gather(*(within(self._ask(session, body)) for body in bodies))

    def _headers(self) -> dict[str, str]:
        if self.token_file is None:
            return dict(self.headers)
        try:
            token = self.token_file.read_text(encoding="utf-8").strip()
        except OSError as error:
            raise ConfigError(f"reward.token_file = {str(self.token_file)!r}: cannot be read: {error}.") from error
        return {**self.headers, "Authorization": f"Bearer {token}"}

    async def _ask(self, session: aiohttp.ClientSession, body: Mapping[str, Any]) -> Any:
        for number in range(self.tries):
            answer = await self._try(session, body)
            if not isinstance(answer, RewardFailure) or answer.outcome is Outcome.WRONG or number + 1 == self.tries:
                break
            # The jitter keeps those that failed together from coming back together.
            await asyncio.sleep(min(self.first_pause_s * (2**number + random.random()), LONGEST_PAUSE_S))
        if isinstance(answer, RewardFailure) and answer.outcome is not Outcome.WRONG:
            return RewardFailure(answer.outcome, f"{answer.message}, after {self.tries} tries")
        return answer

    async def _try(self, session: aiohttp.ClientSession, body: Mapping[str, Any]) -> Any:
        """One request. `infra` and `timeout` may be tried again; what the service refuses it would refuse again."""
        try:
            async with session.post(self.url, json=body) as response:
                if response.status >= 500 or response.status == BUSY:
                    return self._failure(Outcome.INFRA, f"answered {response.status} {await told(response)}")
                if response.status >= 400:
                    return self._failure(Outcome.WRONG, f"refused: {response.status} {await told(response)}")
                try:
                    return await response.json(content_type=None)
                except ValueError:
                    return self._failure(Outcome.INFRA, f"gave no JSON: {await told(response)}")
        except TimeoutError:
            return self._failure(Outcome.TIMEOUT, f"gave no answer within {self.timeout_s:g} s")
        except (aiohttp.ClientError, OSError) as error:
            return self._failure(Outcome.INFRA, f"cannot be asked: {type(error).__name__}: {error}")

    def _failure(self, outcome: Outcome, text: str) -> RewardFailure:
        return RewardFailure(outcome, f"{self.url} {text}")


async def told(response: aiohttp.ClientResponse) -> str:
    text = " ".join((await response.text(errors="replace")).split())
    return text[:SHOWN] + ("…" if len(text) > SHOWN else "")

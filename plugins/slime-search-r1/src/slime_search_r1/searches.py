"""Searches: sends searches to one retrieval server, over one pool of connections.

Searches of one iteration of the event loop are sent in one request: a step has thousands of them, and a request for each would
take longer than the search.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import httpx
from pydantic import BaseModel, TypeAdapter, ValidationError
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from slime_core.errors import PluginError
from slime_core.registry.boundary import held
from slime_search_r1.document import Document
from slime_search_r1.errors import RetrievalTimeout, RetrievalUnavailable

BATCH: Final = 64
FIRST_WAIT_S: Final = 0.2
LONGEST_WAIT_S: Final = 10.0
LARGEST_RESPONSE: Final = 64 * 2**20
"""Bytes."""
MISCONFIGURED: Final = frozenset({401, 403, 404, 405})


@dataclass(frozen=True, slots=True)
class Address:
    url: str
    token: str | None


class Place(Protocol):
    """The retrieval server."""

    async def address(self) -> Address: ...

    async def examine(self, asked: Address) -> None:
        """Called when the server at `asked` has not responded in time."""

    async def close(self) -> None: ...


class Scored(BaseModel):
    """A document in the form of Search-R1's server, with a score if scores are requested."""

    document: Document
    score: float | None = None


class Answer(BaseModel):
    result: list[list[Scored | Document]]


ANSWER: Final = TypeAdapter(Answer)


class Searches:
    """Raises RetrievalUnavailable or RetrievalTimeout after all attempts have failed, and PluginError if the server refuses
    the request (status 401, 403, 404 or 405)."""

    def __init__(self, place: Place, *, topk: int, timeout_s: float, attempts: int, connections: int) -> None:
        self._place = place
        self._topk = topk
        self._timeout_s = timeout_s
        self._attempts = attempts
        self._connections = connections
        self._client: httpx.AsyncClient | None = None
        self._free = asyncio.Semaphore(connections)
        self._waiting: list[tuple[str, asyncio.Future[Sequence[Document]]]] = []
        self._deliveries: set[asyncio.Task[None]] = set()

    async def search(self, query: str) -> Sequence[Document]:
        """Returns up to `topk` documents, best first."""
        if self._topk == 0:
            return ()
        loop = asyncio.get_running_loop()
        if not self._waiting:
            loop.call_soon(self._send_all)
        found: asyncio.Future[Sequence[Document]] = loop.create_future()
        self._waiting.append((query, found))
        return await found

    async def check(self) -> None:
        """PluginError if the server does not respond. Otherwise each search would fail, after all its attempts."""
        if self._topk == 0:
            return
        try:
            await self._ask(["is anybody there?"])
        except (RetrievalUnavailable, RetrievalTimeout) as error:
            raise PluginError(
                f"{error}. Check that the server is running at this address (--generate.search-url). Start one with "
                "`slime-retrieval serve --corpus FILE --port 8000`, or pass --generate.corpus FILE: then the run starts one."
            ) from error

    async def close(self) -> None:
        for delivery in self._deliveries:
            delivery.cancel()
        await asyncio.gather(*self._deliveries, return_exceptions=True)
        if self._client is not None:
            await self._client.aclose()
        await self._place.close()

    def _send_all(self) -> None:
        asked, self._waiting = self._waiting, []
        for start in range(0, len(asked), BATCH):
            delivery = asyncio.create_task(self._deliver(asked[start : start + BATCH]))
            self._deliveries.add(delivery)
            delivery.add_done_callback(self._deliveries.discard)

    async def _deliver(self, asked: Sequence[tuple[str, asyncio.Future[Sequence[Document]]]]) -> None:
        try:
            with held() as failed:
                async with self._free:
                    found = await self._ask([query for query, _ in asked])
        except asyncio.CancelledError:
            for _, future in asked:
                future.cancel()
            raise
        if failed.error is not None:
            # Raised in the tasks that wait for the searches.
            for _, future in asked:
                if not future.done():
                    future.set_exception(failed.error)
            return
        for (_, future), documents in zip(asked, found, strict=True):
            if not future.done():
                future.set_result(documents)

    async def _ask(self, queries: Sequence[str]) -> Sequence[Sequence[Document]]:
        attempts = AsyncRetrying(
            stop=stop_after_attempt(self._attempts),
            wait=wait_random_exponential(multiplier=FIRST_WAIT_S, max=LONGEST_WAIT_S),
            retry=retry_if_exception_type((RetrievalUnavailable, RetrievalTimeout)),
            reraise=True,
        )
        return await attempts(self._ask_once, queries)

    async def _ask_once(self, queries: Sequence[str]) -> Sequence[Sequence[Document]]:
        address = await self._place.address()
        asked = {"queries": list(queries), "topk": self._topk, "return_scores": False}
        headers = {} if address.token is None else {"authorization": f"Bearer {address.token}"}
        try:
            async with asyncio.timeout(self._timeout_s):
                status, body = await self._post(f"{address.url.rstrip('/')}/retrieve", asked, headers)
        except (TimeoutError, httpx.TimeoutException):
            await self._place.examine(address)
            raise RetrievalTimeout(
                f"retrieval server {address.url}: no response within {self._timeout_s:g} s (generate.search_timeout)"
            ) from None
        except httpx.HTTPError as error:
            raise RetrievalUnavailable(f"retrieval server {address.url}: {type(error).__name__}: {error}") from error
        if status in MISCONFIGURED:
            raise PluginError(
                f"retrieval server {address.url}: status {status}, {body[:200].decode(errors='replace')!r}. Check "
                "generate.search_url and generate.search_token_file."
            )
        if status != 200:
            given = body[:200].decode(errors="replace")
            raise RetrievalUnavailable(f"retrieval server {address.url}: status {status}, {given!r}")
        return documents_of(body, len(queries), address.url)

    async def _post(self, url: str, asked: dict[str, Any], headers: dict[str, str]) -> tuple[int, bytes]:
        if self._client is None:
            limits = httpx.Limits(max_connections=self._connections, max_keepalive_connections=self._connections)
            # A server that the run file names is reached directly, without the environment's proxies.
            self._client = httpx.AsyncClient(limits=limits, timeout=self._timeout_s, trust_env=False)
        body = bytearray()
        async with self._client.stream("POST", url, json=asked, headers=headers) as response:
            async for piece in response.aiter_bytes():
                body += piece
                if len(body) > LARGEST_RESPONSE:
                    raise RetrievalUnavailable(
                        f"retrieval server {url}: the response has more than {LARGEST_RESPONSE} bytes"
                    )
            return response.status_code, bytes(body)


def documents_of(body: bytes, num_queries: int, url: str) -> list[list[Document]]:
    """The documents in a response. RetrievalUnavailable if it is invalid."""
    try:
        result = ANSWER.validate_json(body).result
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise RetrievalUnavailable(
            f"retrieval server {url}: invalid response: {'.'.join(map(str, first['loc']))} {first['msg']}"
        ) from None
    if len(result) != num_queries:
        raise RetrievalUnavailable(f"retrieval server {url}: {len(result)} results for {num_queries} queries")
    return [[item.document if isinstance(item, Scored) else item for item in found] for found in result]

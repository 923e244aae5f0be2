"""One way to a retrieval server, well and ill."""

from __future__ import annotations

import asyncio
import json
import socket

import pytest
from retrieval_servers import TOKEN, scripted, searching

from slime_core.errors import PluginError
from slime_search_r1.errors import RetrievalTimeout, RetrievalUnavailable


def result(*found: list[object]) -> bytes:
    return json.dumps({"result": found}).encode()


async def echo(queries: list[str]) -> tuple[int, bytes]:
    return 200, result(*([{"title": query, "text": "t"}] for query in queries))


async def test_many_searches_travel_together_and_keep_apart() -> None:
    async with scripted(echo) as (server, url), searching(url) as searches:
        found = await asyncio.gather(*(searches.search(f"q{number}") for number in range(130)))
    assert [[document.title for document in documents] for documents in found] == [[f"q{n}"] for n in range(130)]
    assert sorted(len(asked) for asked in server.asked) == [2, 64, 64]
    assert set(server.tokens) == {f"bearer {TOKEN}"}


async def test_the_real_server(served: str) -> None:
    async with searching(served) as searches:
        dedent, join, nothing = await asyncio.gather(*map(searches.search, ("what does dedent do", "join", "zzz")))
    assert [document.title for document in dedent] == ["textwrap"]
    assert {document.title for document in join} == {"os.path", "shlex"}
    assert list(nothing) == []


async def test_responses_in_the_form_of_search_r1() -> None:
    async def old_form(queries: list[str]) -> tuple[int, bytes]:
        return 200, result([{"document": {"id": "7", "contents": '"Paris"\nA city.\nIn France.'}, "score": 3.5}])

    async with scripted(old_form) as (_, url), searching(url) as searches:
        (document,) = await searches.search("q")
    assert (document.title, document.text) == ("Paris", "A city.\nIn France.")


async def test_a_server_that_is_down_is_reported_at_the_start() -> None:
    with socket.socket() as closed:
        # Bound, so that no other process listens on the port meanwhile.
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        expected = f"retrieval server {url}: ConnectError.*slime-retrieval serve --corpus"
        async with searching(url, attempts=1) as searches:
            with pytest.raises(PluginError, match=expected):
                await searches.check()
    async with scripted(echo) as (server, url), searching(url) as searches:
        await searches.check()
    assert len(server.asked) == 1


async def test_trouble_that_passes_is_waited_for() -> None:
    async def at_last(queries: list[str]) -> tuple[int, bytes]:
        return (503, b"busy") if len(server.asked) < 3 else await echo(queries)

    async with scripted(at_last) as (server, url), searching(url, attempts=3) as searches:
        (document,) = await searches.search("q")
    assert document.title == "q"
    assert len(server.asked) == 3


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"<html>", "Invalid JSON"),
        (b"{}", "result Field required"),
        (result(), "0 results for 1 queries"),
        (result(["text"]), "result.0.0"),
        (result([{"title": None}]), "result.0.0"),
        (result([{}]), "result.0.0"),
    ],
)
async def test_an_invalid_response_is_an_error(body: bytes, expected: str) -> None:
    async def nonsense(queries: list[str]) -> tuple[int, bytes]:
        return 200, body

    async with scripted(nonsense) as (_, url), searching(url) as searches:
        with pytest.raises(RetrievalUnavailable, match=expected):
            await searches.search("q")


async def test_a_flood_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slime_search_r1.searches.LARGEST_RESPONSE", 10_000)

    async def flood(queries: list[str]) -> tuple[int, bytes]:
        return 200, b" " * 1_000_000

    async with scripted(flood) as (_, url), searching(url) as searches:
        with pytest.raises(RetrievalUnavailable, match="more than 10000 bytes"):
            await searches.search("q")


async def test_a_server_that_answers_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    now, ahead = loop.time, 0.0

    async def late(queries: list[str]) -> tuple[int, bytes]:
        # The time passes at once: a limit that is waited for is too short for a busy machine, or too long for a test.
        nonlocal ahead
        ahead += 5.1
        await asyncio.Event().wait()
        return await echo(queries)

    monkeypatch.setattr(loop, "time", lambda: now() + ahead)
    async with scripted(late) as (server, url), searching(url, timeout_s=5.0, attempts=2) as searches:
        with pytest.raises(RetrievalTimeout, match=r"no response within 5 s"):
            await asyncio.wait_for(searches.search("q"), 60)
    assert len(server.asked) == 2


async def test_a_server_that_is_down() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        async with searching(f"http://127.0.0.1:{closed.getsockname()[1]}") as searches:
            failed = await asyncio.gather(*(searches.search(f"{n}") for n in range(3)), return_exceptions=True)
    assert [type(error) for error in failed] == [RetrievalUnavailable] * 3


async def test_what_only_the_user_can_fix_stops_the_run(served: str) -> None:
    async def unknown(queries: list[str]) -> tuple[int, bytes]:
        return 404, b"no such path"

    async with scripted(unknown) as (server, url), searching(url, attempts=3) as searches:
        with pytest.raises(PluginError, match=r"404.*generate\.search_url"):
            await searches.search("q")
    assert len(server.asked) == 1


async def test_a_cancelled_search_does_not_affect_others() -> None:
    async with scripted(echo) as (_, url), searching(url) as searches:
        first, second = (asyncio.create_task(searches.search(query)) for query in "ab")
        await asyncio.sleep(0)
        first.cancel()
        assert (await second)[0].title == "b"

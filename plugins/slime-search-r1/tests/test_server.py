"""The retrieval server: what it ranks, what it refuses, and its life as a run's own process."""

from __future__ import annotations

import math
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from retrieval_servers import DOCUMENTS, TOKEN

from slime_core.errors import DataError, PluginError
from slime_search_r1.places import OwnServer
from slime_search_r1.searches import Searches
from slime_search_r1.server.corpus import read_corpus
from slime_search_r1.server.index import Index


def bm25(query: str, texts: list[str], k1: float = 1.5, b: float = 0.75) -> list[float]:
    """Lucene's variant, by hand."""
    words = [re.findall(r"\w+", text.lower()) for text in texts]
    mean = sum(map(len, words)) / len(words)
    scores = [0.0] * len(texts)
    for word in set(re.findall(r"\w+", query.lower())):
        holds = sum(word in of_text for of_text in words)
        idf = math.log(1 + (len(texts) - holds + 0.5) / (holds + 0.5))
        for number, of_text in enumerate(words):
            count = of_text.count(word)
            scores[number] += idf * count / (count + k1 * (1 - b + b * len(of_text) / mean))
    return scores


@pytest.mark.parametrize("query", ["join a string", "Python object", "document line text", "os"])
def test_it_ranks_by_bm25(index: Index, query: str) -> None:
    expected = bm25(query, [f"{d.title}\n{d.text}" for d in DOCUMENTS])
    (hits,) = index.search([query], 10)
    assert [hit.score for hit in hits] == sorted((hit.score for hit in hits), reverse=True)
    found = {DOCUMENTS.index(hit.document): hit.score for hit in hits}
    assert found == pytest.approx({n: score for n, score in enumerate(expected) if score > 0}, rel=1e-5)
    assert len(index.search([query], 1)[0]) == 1


async def test_what_it_is_asked(served: str) -> None:
    async with httpx.AsyncClient(base_url=served, headers={"authorization": f"Bearer {TOKEN}"}) as client:
        good = await client.post("/retrieve", json={"queries": ["dedent", "zzz"], "topk": 1, "return_scores": True})
        (hit,), nothing = good.json()["result"]
        assert hit["document"]["title"] == "textwrap"
        assert hit["document"]["contents"].startswith('"textwrap"\ndedent: ')
        assert hit["score"] > 0
        assert nothing == []
        for wrong in ({}, {"queries": "one"}, {"queries": ["x"], "topk": 0}, {"queries": ["x"], "top_k": 2}):
            refused = await client.post("/retrieve", json=wrong)
            assert refused.status_code == 422, wrong
            assert refused.json()["error"]
        assert (await client.get("/health", headers={"authorization": ""})).json() == {"status": "ok", "documents": 4}
        for token in ("", "Bearer wrong"):
            assert (await client.post("/retrieve", headers={"authorization": token})).status_code == 401


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (['{"title": "a", "text": "b"}', "no json"], "line 2: Invalid JSON"),
        (['{"words": "a"}'], "line 1: Value error, a document has title and text, or contents"),
        (["", ""], "there is no document in it"),
    ],
)
def test_an_invalid_corpus_is_refused(tmp_path: Path, lines: list[str], expected: str) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_text("\n".join(lines))
    with pytest.raises(DataError, match=expected):
        read_corpus(path)
    with pytest.raises(DataError, match="cannot be read"):
        read_corpus(tmp_path / "none.jsonl")


async def test_a_server_of_the_runs_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slime_search_r1.places.END_LIMIT_S", 60.0)
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(document.model_dump_json() + "\n" for document in DOCUMENTS))
    own = OwnServer(corpus)
    searches = Searches(own, topk=1, timeout_s=30, attempts=3, connections=2)
    try:
        assert (await searches.search("dedent"))[0].title == "textwrap"
        first = await own.address()
        async with httpx.AsyncClient() as client:
            assert (await client.post(f"{first.url}/retrieve", json={"queries": ["x"]})).status_code == 401
        # One that dies is started again.
        process = own._process
        assert process is not None
        os.kill(process.pid, signal.SIGKILL)
        await process.wait()
        assert (await searches.search("dedent"))[0].title == "textwrap"
        again = own._process
        assert again is not None
        assert again.pid != process.pid
    finally:
        await searches.close()
    assert again.returncode == 0


async def test_an_own_server_that_hangs_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else every later search would wait for it and fail."""
    monkeypatch.setattr("slime_search_r1.places.HEALTH_S", 0.5)
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(document.model_dump_json() + "\n" for document in DOCUMENTS))
    own = OwnServer(corpus)
    searches = Searches(own, topk=1, timeout_s=30, attempts=20, connections=2)
    try:
        assert (await searches.search("dedent"))[0].title == "textwrap"
        searches._timeout_s = 0.5
        hung = own._process
        assert hung is not None
        os.kill(hung.pid, signal.SIGSTOP)
        assert (await searches.search("dedent"))[0].title == "textwrap"
        # It was killed though it was stopped, and another one responded.
        assert hung.returncode == -signal.SIGKILL
        assert own._process is not None
        assert own._process.pid != hung.pid
    finally:
        await searches.close()


async def test_an_invalid_corpus_is_refused_stops_the_run(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("no json\n")
    own = OwnServer(corpus)
    with pytest.raises(PluginError, match=r"generate\.corpus: .*corpus\.jsonl, line 1: Invalid JSON"):
        await own.address()
    await own.close()


def test_it_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text(DOCUMENTS[0].model_dump_json() + "\n")
    child = subprocess.Popen(
        [sys.executable, "-m", "slime_search_r1.server.child", str(corpus)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write("token\n")
    child.stdin.flush()
    assert '"port"' in child.stdout.readline()
    child.stdin.close()
    assert child.wait(timeout=20) == 0
    child.stdout.close()

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest

from slime_core.types.prompt import Prompt
from slime_core.types.sample import Sample, SampleGroup


def group_of(label: Any, *responses: str, metadata: dict[str, Any] | None = None, text: str = "q") -> SampleGroup:
    given = metadata or {}
    prompt = Prompt(
        group_index=7,
        text=text,
        token_ids=np.array([1], np.int32),
        label=label,
        origin="train.jsonl:12",
        metadata=given,
    )
    samples = tuple(
        Sample(
            index=index,
            group_index=7,
            rollout_id=index,
            prompt=prompt,
            tokens=np.array([1, 2], np.int32),
            prompt_length=1,
            loss_mask=np.ones(1, np.uint8),
            rollout_log_probs=np.zeros(1, np.float32),
            response=response,
            metadata=given,
        )
        for index, response in enumerate(responses)
    )
    return SampleGroup(prompt=prompt, samples=samples)


@pytest.fixture(scope="session")
def make_group() -> Callable[..., SampleGroup]:
    return group_of


@dataclass
class ScriptedService:
    """Answers each request with what `script` makes of its body and of how often it was asked the same:
    (status, text, seconds to wait)."""

    url: str = ""
    script: Callable[[str, dict[str, Any], int], tuple[int, str, float]] = lambda path, body, tries: (200, "1", 0.0)
    asked: list[tuple[str, dict[str, Any], dict[str, str]]] = field(default_factory=list)

    def tries_of(self, body: dict[str, Any]) -> int:
        return sum(known == body for _, known, _ in self.asked)


@pytest.fixture(scope="session")
def running_service() -> Iterator[ScriptedService]:
    service = ScriptedService()
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                service.asked.append((self.path, body, dict(self.headers)))
                status, text, wait = service.script(self.path, body, service.tries_of(body))
            time.sleep(wait)
            data = text.encode()
            try:
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)
            except OSError:
                # The client has closed the connection.
                return

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    service.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield service
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def scripted(running_service: ScriptedService) -> ScriptedService:
    running_service.asked.clear()
    return running_service

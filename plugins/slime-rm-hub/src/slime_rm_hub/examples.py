"""Examples for the contract kit. Rewards that send requests get a service in this process."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from slime_core.contracts.example import Example, RewardExample

F1 = (
    RewardExample(
        prompt="Who wrote it?",
        label="Jane Austen",
        responses=(
            "Jane Austen",
            "jane austen!",
            "Jane",
            "It was the Jane Austen",
            "Brontë",
            "",
            "<think>Jane</think>no",
        ),
        # It was Jane Austen: 2 of 4 words, all 2 of the label: 2 x 2 / (4 + 2).
        rewards=(1.0, 1.0, 2 / 3, 4 / 6, 0.0, 0.0, 0.0),
    ),
    RewardExample(
        options={"boxed": True},
        prompt="Is it?",
        label=["yes", "it is"],
        responses=("\\boxed{Yes.}", "yes", "\\boxed{yes it is}", "\\boxed{no} \\boxed{it is}", "\\boxed{yes"),
        rewards=(1.0, 0.0, 0.8, 1.0, 0.0),
    ),
)

GPQA = (
    RewardExample(
        prompt="Which?",
        label="B",
        metadata={"choices": ["iron", "noble gas", "salt"]},
        responses=(
            "The answer is B.",
            "Answer: (C)",
            "**Answer: B**",
            "Option A is wrong. The correct choice is \\boxed{B}",
            "I think A</think> so it is C, no, B",
            "The answer is Because",
            "a noble gas",
            "",
            "D",
        ),
        rewards=(1.0, 0.0, 1.0, 1.0, 1.0, 0.0, 1.0, 0.0, 0.0),
    ),
    RewardExample(
        prompt="Which?",
        label=2,
        responses=("C", "c", "B is correct", "C is the correct one"),
        rewards=(1.0, 0.0, 0.0, 1.0),
    ),
)

IFBENCH = (
    RewardExample(
        prompt="Write without commas, in lower case.",
        label=None,
        metadata={
            "instruction_id_list": ["punctuation:no_comma", "change_case:english_lowercase", "detectable_format:title"],
            "kwargs": [{}, None, {"num_words": None}],
        },
        responses=(
            "<<a day>>\nthe sun shines on the green hills today",
            "<<a day>>\nthe sun, the moon and the stars",
            "The Sun Shines On The Hills, Today",
            "",
        ),
        rewards=(1.0, 0.0, 0.0, 0.0),
    ),
)


class Scripted(BaseHTTPRequestHandler):
    """Scores a text by its length, modulo 7, as a classifier or as a remote service, by the path of the request."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/classify":
            answer: object = {"embedding": [float(len(body["text"]) % 7)], "meta_info": {}}
        else:
            answer = {"score": float(len(body["response"]) % 7), "comment": "by length"}
        data = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Logs nothing."""


@cache
def scripted_url() -> str:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Scripted)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}"


def remote() -> Sequence[Example]:
    return (
        RewardExample(
            options={"rm_url": f"{scripted_url()}/score", "tries": 2},
            prompt="2+2=",
            label="4",
            responses=("4", "", "12345678"),
        ),
    )


def served() -> Sequence[Example]:
    return (
        RewardExample(
            options={"rm_url": scripted_url(), "tries": 2},
            prompt="2+2=",
            label="4",
            responses=("4", "", "12345678"),
            rewards=(5.0, 4.0, 5.0),
        ),
    )

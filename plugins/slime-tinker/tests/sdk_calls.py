"""A client that sends the SDK's messages without the SDK, in any order, to an app in this process."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
from tinker.proto import tinker_public_pb2 as pb
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.types import Datum, ForwardBackwardRequest, ModelInput
from tinker.types.forward_backward_input import ForwardBackwardInput

from slime_core.registry import Registry
from slime_tinker.app import asgi
from slime_tinker.keys import Keys
from slime_tinker.service import Service, running
from slime_tinker.settings import Limits, Retention, Settings


def settings(folder: Path, **given: Any) -> Settings:
    return Settings(state=folder, **{"poll_s": 0.2, "save_after_s": 1e9, **given})


@contextlib.asynccontextmanager
async def serving(models: Any, chosen: Settings, keys: Any = None) -> AsyncIterator[tuple[Service, Calls]]:
    async with running(models, chosen, Registry.from_environment()) as service:
        transport = httpx.ASGITransport(app=asgi(service, keys))
        async with httpx.AsyncClient(transport=transport, base_url="http://server/api/v1/") as client:
            yield service, Calls(client)


def two_tenants() -> tuple[Keys, str, str]:
    """And the key of each."""
    keys, one = Keys().added("one")
    keys, two = keys.added("two")
    return keys, one, two


class Killed(Exception):
    """In place of SIGKILL: nothing is saved at the end."""


async def killed(models: Any, chosen: Settings, script: Callable[[Service, Calls], Awaitable[Any]]) -> Any:
    """Runs `script(service, calls)` and ends the server without its last savings."""
    found = []
    try:
        async with serving(models, chosen) as (service, calls):
            found.append(await script(service, calls))
            raise Killed
    except* Killed:
        pass
    return found[0]


class Calls:
    def __init__(self, client: httpx.AsyncClient) -> None:
        self.client = client
        self.key = "tml-any"

    async def post(
        self, endpoint: str, content: bytes | None = None, kind: str = "application/json", **body: Any
    ) -> httpx.Response:
        data = json.dumps(body).encode() if content is None else content
        return await self.client.post(
            endpoint, content=data, headers={"content-type": kind, "x-api-key": self.key}, timeout=60
        )

    async def get(self, path: str) -> Any:
        return (await self.client.get(path, headers={"x-api-key": self.key})).json()

    async def session(self) -> str:
        response = await self.post("create_session", tags=[], user_metadata=None, sdk_version="0.38.0")
        return str(response.json()["session_id"])

    async def model(self, session: str, number: int = 0, seed: int = 0, *, wait: bool = True) -> str:
        response = await self.post(
            "create_model",
            session_id=session,
            model_seq_id=number,
            base_model="base",
            lora_config={"rank": 4, "seed": seed},
        )
        assert response.status_code == 200, response.text
        if wait:
            await self.result(response.json()["request_id"])
        return str(response.json()["model_id"])

    async def forward_backward(self, model: str, seq: int, *firsts: int, forward_only: bool = False) -> str:
        """Datums that begin with these tokens."""
        datums = [
            Datum(model_input=ModelInput.from_ints([first, 2]), loss_fn_inputs={"target_tokens": [2, 3]})
            for first in firsts
        ]
        given = ForwardBackwardInput(data=datums, loss_fn="cross_entropy")
        message = forward_backward_request_to_proto(
            ForwardBackwardRequest(forward_backward_input=given, model_id=model, seq_id=seq)
        )
        message.forward_only = forward_only
        response = await self.post("forward_backward", message.SerializeToString(), "application/x-protobuf")
        assert response.status_code == 200, response.text
        return str(response.json()["request_id"])

    async def optim_step(self, model: str, seq: int, lr: float = 0.5) -> str:
        response = await self.post("optim_step", model_id=model, seq_id=seq, adam_params={"learning_rate": lr})
        assert response.status_code == 200, response.text
        return str(response.json()["request_id"])

    async def save(self, model: str, seq: int, name: str, **given: Any) -> Any:
        response = await self.post("save_weights", model_id=model, seq_id=seq, path=name, **given)
        return await self.result(response.json()["request_id"])

    async def load(self, model: str, seq: int, path: str) -> Any:
        response = await self.post("load_weights", model_id=model, seq_id=seq, path=path, optimizer=True)
        return await self.result(response.json()["request_id"])

    async def snapshot(self, model: str, seq: int, number: int) -> str:
        """A sampling session of the model as it is."""
        response = await self.post(
            "save_weights_for_sampler", model_id=model, seq_id=seq, sampling_session_seq_id=number
        )
        return str((await self.result(response.json()["request_id"]))["sampling_session_id"])

    async def sample(self, sampler: str, seq: int, **given: Any) -> str:
        body = {
            "sampling_session_id": sampler,
            "seq_id": seq,
            "prompt": {"chunks": [{"tokens": [5, 6, 7], "type": "encoded_text"}]},
            "sampling_params": {"max_tokens": 1},
            **given,
        }
        response = await self.post("asample", **body)
        assert response.status_code == 200, response.text
        return str(response.json()["request_id"])

    async def fetch(self, request_id: str) -> httpx.Response:
        return await self.post("retrieve_future", request_id=request_id)

    async def result(self, request_id: str) -> Any:
        """JSON, or a protobuf message; polled as the SDK does."""
        while True:
            response = await self.fetch(request_id)
            assert response.status_code == 200, response.text
            if response.headers["content-type"].startswith("application/x-protobuf"):
                kind = pb.SampleResponse if ":sampler:" in request_id else pb.ForwardBackwardOutput
                return kind.FromString(response.content)
            if response.json().get("type") != "try_again":
                return response.json()


def limits(**given: Any) -> Limits:
    return Limits(**given)


def retention(**given: Any) -> Retention:
    return Retention(**given)

"""A server that is asked to end."""

import asyncio
import os
import signal

import httpx
import pytest
from scripted_models import ScriptedModels
from sdk_calls import Calls, settings

from slime_core.registry import Registry
from slime_serving.listener import listen
from slime_tinker.serve import until_ended

pytestmark = pytest.mark.asyncio


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
async def test_models_are_saved_and_the_process_lives(tmp_path, number):
    models, ready, listener = ScriptedModels(), asyncio.Event(), listen("127.0.0.1", 0, backlog=9)
    port = listener.getsockname()[1]
    before = signal.getsignal(number)
    serving = until_ended(
        models,
        settings(tmp_path),
        Registry.from_environment(),
        listener=listener,
        keys=None,
        tls=None,
        ready=ready.set,
    )
    ended = asyncio.create_task(serving)
    await ready.wait()
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}/api/v1/") as client:
        calls = Calls(client)
        model = await calls.model(await calls.session())
        await calls.result(await calls.optim_step(model, 1))
        os.kill(os.getpid(), number)
        await asyncio.wait_for(ended, 20)
    assert models.calls[-1] == f"{model} save"
    assert signal.getsignal(number) is before

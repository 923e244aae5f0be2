"""The errors of an engine whose server hangs or dies. Runs last (conftest.py): it ends the session's server."""

import asyncio
import signal

import psutil
import pytest
from vllm_setup import endless

from slime_core.errors import EngineError

pytestmark = pytest.mark.vllm


def test_an_engine_notices_that_its_servers_process_hangs_or_dies(served):
    """vLLM's engine process, whose parent still responds."""
    core = next(child for child in psutil.Process(served.pid).children() if "EngineCore" in "".join(child.cmdline()))
    served.run(served.engine.health())
    core.send_signal(signal.SIGSTOP)
    with pytest.raises(EngineError, match=r"/weight_info got no response in"):
        served.run(served.engine.health())
    core.send_signal(signal.SIGCONT)
    served.run(served.engine.health())

    async def lose():
        waiting = asyncio.create_task(served.engine.generate([endless("lost")]))
        await served.until_generating(1)
        core.kill()
        with pytest.raises(EngineError):
            await waiting
        while True:
            await served.engine.health()
            await asyncio.sleep(0.05)

    # vLLM's main process notices it after a while, and ends.
    errors = (
        f"its process {served.pid}",
        "weight_info got no response",
        "status 50",
        "no server responds",
        "closed the connection",
    )
    noticed = "|".join(errors)
    with pytest.raises(EngineError, match=noticed):
        served.run(lose())

"""`python reproducible_server.py SECONDS_PER_TOKEN FAILING`: a server with SGLang's routes. Its tokens depend on the
request's seed and their places alone: not on what else it serves, nor on how often a response is interrupted. It prints
its port.

FAILING: the number of the one request that fails, 0 for none.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any, Final

import xxhash
from aiohttp import web

FIRST: Final = 4
LAST: Final = 14
"""It draws tokens from FIRST to before LAST."""


def draw(seed: int, place: int) -> int:
    return xxhash.xxh3_64_intdigest(f"{seed} {place}".encode())


class Server:
    def __init__(self, seconds_per_token: float, failing: int) -> None:
        self._pace = seconds_per_token
        self._until_failure = failing
        self._version = "default"
        self._running: dict[str, asyncio.Event] = {}

    def app(self) -> web.Application:
        app = web.Application(client_max_size=1 << 26)
        app.router.add_post("/generate", self.generate)
        app.router.add_post("/abort_request", self.abort)
        app.router.add_get("/server_info", self.info)
        app.router.add_get("/model_info", self.model)
        app.router.add_get("/health_generate", self.info)
        app.router.add_post("/{other}", self.other)
        return app

    async def info(self, request: web.Request) -> web.Response:
        return web.json_response({"version": "0.5.20", "tp_size": 1})

    async def model(self, request: web.Request) -> web.Response:
        return web.json_response({"weight_version": self._version})

    async def other(self, request: web.Request) -> web.Response:
        body = await request.json() if request.can_read_body else {}
        self._version = body.get("weight_version") or self._version
        return web.json_response({"success": True, "message": ""})

    async def abort(self, request: web.Request) -> web.Response:
        body = await request.json()
        for rid, aborted in self._running.items():
            if body.get("abort_all") or rid.startswith(body["rid"]):
                aborted.set()
        return web.json_response({})

    async def generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        self._until_failure -= 1
        if not self._until_failure:
            return web.json_response({"error": "out of memory"}, status=500)
        sampling, start = body["sampling_params"], len(body["input_ids"])
        version, seed, rid = self._version, sampling.get("sampling_seed", 0), body.get("rid", "")
        tokens, reason = [], "length"
        for place in range(start, start + sampling["max_new_tokens"]):
            tokens.append(FIRST + draw(seed, place) % (LAST - FIRST))
            if draw(seed, -place - 1) % 12 == 0:
                reason = "stop"
                break
        began = asyncio.get_running_loop().time()
        aborted = self._running[rid] = asyncio.Event()
        try:
            async with asyncio.timeout(len(tokens) * self._pace):
                await aborted.wait()
            written = int((asyncio.get_running_loop().time() - began) / self._pace)
            # An abort that comes late finds a response that has ended.
            tokens, reason = tokens[:written], "abort" if written < len(tokens) else reason
        except TimeoutError:
            pass
        finally:
            self._running.pop(rid, None)
        rows = [[-(draw(seed, token) % 1000) / 500, token, None] for token in tokens]
        meta: dict[str, Any] = {
            "finish_reason": {"type": reason},
            "prompt_tokens": start,
            "output_token_logprobs": rows,
            "weight_version": version,
            "weight_versions": [{"version": version, "start": 0, "end": len(rows)}],
        }
        return web.json_response({"text": "", "output_ids": tokens, "meta_info": meta})


async def main() -> None:
    runner = web.AppRunner(Server(float(sys.argv[1]), int(sys.argv[2])).app(), access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())

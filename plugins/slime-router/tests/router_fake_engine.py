"""A fake SGLang server: its responses are a script, written down here without slime's code."""

import asyncio
import json

from aiohttp import web

TEXT = {1: "4", 2: "2", 3: " is", 4: " ok", 9: "<end>"}


ASKED = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 8, "temperature": 0.5}, "return_logprob": True}


def events(data):
    """The events of a stream, which must end as SGLang's do."""
    pieces = data.decode().split("\n\n")
    assert pieces[-2:] == ["data: [DONE]", ""]
    return [json.loads(piece.removeprefix("data: ")) for piece in pieces[:-2]]


def response_to(body, token_ids=(1, 2, 9), version="5"):
    """A response in the form of SGLang 0.5.20."""
    return {
        "text": "".join(TEXT.get(token, "?") for token in token_ids),
        "output_ids": list(token_ids),
        "meta_info": {
            "id": body.get("rid"),
            "finish_reason": {"type": "stop", "matched": token_ids[-1]},
            "prompt_tokens": len(body.get("input_ids") or []),
            "output_token_logprobs": [[-0.25 * (place + 1), token, None] for place, token in enumerate(token_ids)],
            "weight_version": version,
            "completion_tokens": len(token_ids),
            "cached_tokens": 1,
            "e2e_latency": 0.125,
        },
    }


class FakeSglang:
    """`reply(body)` may return a dict, bytes, a web.Response, or raise; `hold` keeps responses back until it is set."""

    generate_path, abort_path = "/generate", "/abort_request"

    def __init__(self, health=None):
        if health is not None:
            self.health = health
        self.seen = []
        self.peers = set()
        self.headers = []
        self.aborts = []
        self.gone = []
        self.reply = response_to
        self.hold = asyncio.Event()
        self.hold.set()
        self.incremental = False
        self.break_stream_after = None
        self.routes = {}

    async def __aenter__(self):
        app = web.Application()
        app.router.add_post(self.generate_path, self.generate)
        app.router.add_post(self.abort_path, self.abort)
        app.router.add_get("/health", self.health)
        app.router.add_get("/workers", self.workers)
        self.runner = web.AppRunner(app, handler_cancellation=True)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        port = self.runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{port}"
        return self

    async def __aexit__(self, *raised):
        self.hold.set()
        await self.runner.cleanup()

    async def health(self, request):
        return web.Response()

    async def workers(self, request):
        return web.json_response(self.routes.get("workers", {}))

    async def abort(self, request):
        if "abort" in self.routes:
            return web.Response(status=self.routes["abort"])
        self.aborts.append(json.loads(await request.read()))
        return web.Response()

    async def generate(self, request):
        body = json.loads(await request.read())
        self.seen.append(body)
        self.peers.add(request.transport.get_extra_info("peername"))
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        try:
            await self.hold.wait()
            if body.get("stream"):
                return await self.stream(request, body)
            reply = self.reply(body)
            if isinstance(reply, web.Response):
                return reply
            data = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
            return web.Response(body=data, content_type="application/json")
        except asyncio.CancelledError:
            self.gone.append(body.get("rid"))
            raise

    async def stream(self, request, body):
        whole = self.reply(body)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        ids, log_probs = whole["output_ids"], whole["meta_info"]["output_token_logprobs"]
        for number in range(1, len(ids) + 1):
            if number - 1 == self.break_stream_after:
                request.transport.abort()
                return response
            start = number - 1 if self.incremental else 0
            meta = {**whole["meta_info"], "output_token_logprobs": log_probs[start:number], "completion_tokens": number}
            meta["finish_reason"] = whole["meta_info"]["finish_reason"] if number == len(ids) else None
            text = "".join(TEXT.get(token, "?") for token in ids[start:number])
            event = {"text": text, "output_ids": ids[start:number], "meta_info": meta}
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
            await asyncio.sleep(0)
        await response.write(b"data: [DONE]\n\n")
        return response

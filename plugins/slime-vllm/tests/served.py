"""Served: the running servers of the tests."""

import asyncio
import json
import re
import urllib.error
import urllib.request

import torch
from vllm_setup import setup_for

from slime_plugin_kit.tiny_model import buckets_of, load_plain, named_weights
from slime_vllm.plugin import Vllm

INJECTED = "for extended collective_rpc calls"
"""vLLM logs it before it makes a worker."""


async def begun_early(engine, setup):
    """Starts servers as while trainers load; returns their logs when both have imported everything, and waited a second."""
    await engine.prepare_start(setup)
    processes = [begun.process for begun in engine._fleet._begun.values()]
    while not (logs := logs_in(setup.run_dir)) or not all(INJECTED in log for log in logs):
        assert [process.exit_code for process in processes] == [None, None], [p.last_lines() for p in processes]
        await asyncio.sleep(0.1)
    await asyncio.sleep(1)
    return logs_in(setup.run_dir)


def logs_in(folder):
    return [log.read_text() for log in sorted((folder / "logs").glob("vllm-*.log"))]


class Served:
    """A running server, without anything of ours in between, and the `addresses` of it and of a second one."""

    def __init__(self, info, addresses, model, folder, engine, background, at_gate=()):
        self.engine, self.run = engine, background.run
        """The engine that started it, whose calls run in another thread."""
        self.address, self.token, self.pid = info.address, info.token, info.pid
        self.addresses = addresses
        self.at_gate, self.logs = at_gate, logs_in(folder)
        """What they had logged when they waited for their start, and what they have by now."""
        self.model, self._folder = model, folder
        self.token_file = folder / "token"
        self.token_file.write_text(self.token)

    def ask(self, path, body=None, token=None, address=None):
        data = None if body is None else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {token or self.token}", "Content-Type": "application/json"}
        request = urllib.request.Request((address or self.address) + path, data=data, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return response.status, json.loads(response.read() or b"null")
        except urllib.error.HTTPError as error:
            return error.code, None

    def renew(self):
        """The weights of the folder and the version of a start, no requests, no pause."""
        self.run(self._load_folder())
        self.ask("/update_weight_version", {"new_version": "default"})

    async def _load_folder(self):
        engine = self.attach()
        await engine.start(setup_for(self.model, self._folder))
        try:
            await engine.pause()
            await engine.load_bucket(*buckets_of(named_weights(load_plain(self.model, torch.float32)), 0, 1))
            await engine.resume()
        finally:
            await engine.stop()

    def attach(self, **options):
        """An engine, not started, on the server."""
        attached = {"external_engine_addrs": (self.address,), "external_engine_token_file": str(self.token_file)}
        return Vllm.build(Vllm.Config(**(attached | options)))

    async def until_generating(self, tokens=20):
        """Waits until it has generated so many more tokens."""
        enough = self.generated() + tokens
        while self.generated() < enough:  # noqa: ASYNC110 - the server has no event for it
            await asyncio.sleep(0.01)

    def generated(self):
        return self.counted("generation_tokens", self.address)

    def counted(self, name, address):
        """A counter of vLLM's."""
        request = urllib.request.Request(address + "/metrics", headers={"Authorization": f"Bearer {self.token}"})
        with urllib.request.urlopen(request, timeout=60) as response:
            text = response.read().decode()
        return sum(float(count) for count in re.findall(rf"^vllm:{name}_total\{{.*\}} (\S+)$", text, re.MULTILINE))

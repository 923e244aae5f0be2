"""A server of SGLang or vLLM as its own command line starts it, for comparison with the same one in a run."""

from __future__ import annotations

import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

OF_SLIME = frozenset({"name", "pause_mode", "python", "servers", "sleep_level", "start_timeout"})
"""Options of slime's engines that no server has."""


@dataclass(frozen=True, slots=True)
class PlainServer(ABC):
    """Subclasses know how their programs are started and asked."""

    options: Mapping[str, Any]
    """The engine's options as in a run file."""
    model: Path
    device: str
    generate: ClassVar[str]
    """Route of requests with tokens."""
    flush: ClassVar[str]
    """Route that drops the prefix cache."""
    routed: ClassVar[bool]
    """slime-router serves its route of requests with tokens."""

    @classmethod
    @abstractmethod
    def batch_options(cls, in_flight: int) -> dict[str, int]:
        """Options by which this many requests are one batch, decoded by a CUDA graph: what slime's engine asks for."""

    @abstractmethod
    def command(self, port: int) -> list[str]:
        """Words that start it."""

    def environment(self) -> dict[str, str]:
        """An interpreter of its own finds its own packages."""
        apart = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"} if "python" in self.options else set()
        return {name: value for name, value in os.environ.items() if name not in apart}

    @abstractmethod
    def body(self, place: int, prompt: Sequence[int], new_tokens: int) -> dict[str, Any]:
        """A request that ends with `new_tokens` tokens; `place` differs between requests."""

    @abstractmethod
    def num_tokens(self, response: Any) -> int:
        """Tokens that it generated."""

    @property
    def python(self) -> str:
        return str(self.options.get("python", sys.executable))

    def flags(self) -> list[str]:
        words: list[str] = []
        for name, value in self.options.items():
            if name not in OF_SLIME:
                flag = f"--{name.replace('_', '-')}"
                words += [flag] if value is True else [] if value is False else [flag, str(value)]
        return words


class PlainSglang(PlainServer):
    generate: ClassVar[str] = "/generate"
    flush: ClassVar[str] = "/flush_cache"
    routed: ClassVar[bool] = True

    @classmethod
    def batch_options(cls, in_flight: int) -> dict[str, int]:
        return {"cuda_graph_max_bs_decode": min(in_flight, 1024)} if in_flight > 256 else {}

    def command(self, port: int) -> list[str]:
        return [
            self.python, "-m", "sglang.launch_server", "--model-path", str(self.model), "--port", str(port),
            "--device", self.device, "--skip-server-warmup", "--log-level-http", "warning", *self.flags(),
        ]  # fmt: skip

    def body(self, place: int, prompt: Sequence[int], new_tokens: int) -> dict[str, Any]:
        sampling = {"max_new_tokens": new_tokens, "temperature": 1.0, "ignore_eos": True}
        return {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True}

    def num_tokens(self, response: Any) -> int:
        return int(response["meta_info"]["completion_tokens"])


class PlainVllm(PlainServer):
    """In the mode whose routes drop the cache, with log-probs of the distribution that was sampled from: as in a run."""

    generate: ClassVar[str] = "/inference/v1/generate"
    flush: ClassVar[str] = "/reset_prefix_cache"
    routed: ClassVar[bool] = False

    @classmethod
    def batch_options(cls, in_flight: int) -> dict[str, int]:
        sequences = {"max_num_seqs": in_flight} if in_flight > 256 else {}
        return sequences | ({"max_cudagraph_capture_size": min(in_flight, 1024)} if in_flight > 512 else {})

    def command(self, port: int) -> list[str]:
        return [
            self.python, "-m", "vllm.entrypoints.cli.main", "serve", str(self.model), "--port", str(port),
            "--dtype", "float32" if self.device == "cpu" else "bfloat16", "--enable-scale-out",
            "--logprobs-mode", "processed_logprobs", "--disable-uvicorn-access-log", *self.flags(),
        ]  # fmt: skip

    def environment(self) -> dict[str, str]:
        own = {"VLLM_SERVER_DEV_MODE": "1"}
        if self.device == "cpu":
            own |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        return super().environment() | own

    def body(self, place: int, prompt: Sequence[int], new_tokens: int) -> dict[str, Any]:
        sampling = {
            "max_tokens": new_tokens,
            "temperature": 1.0,
            "ignore_eos": True,
            "logprobs": 0,
            "detokenize": False,
        }
        return {"request_id": f"plain-{place}", "token_ids": prompt, "sampling_params": sampling, "stream": False}

    def num_tokens(self, response: Any) -> int:
        return len(response["choices"][0]["token_ids"])


PROGRAMS: Mapping[str, type[PlainServer]] = {"sglang": PlainSglang, "vllm": PlainVllm}

"""Connection to a server of vLLM."""

from __future__ import annotations

import re
from typing import Any, ClassVar, Final

import numpy as np

from slime_serving.connection import Connection, HttpDialect
from slime_serving.running import INVALID, TokenRows
from slime_serving.server_process import LogFormat
from slime_vllm.adapter import LOAD, UNLOAD

VLLM_LOG: Final = LogFormat(
    stamp=re.compile(r"^(\([A-Za-z0-9_]+ pid=\d+\) )?([A-Z]+ \d\d-\d\d \d\d:\d\d:\d\d \[[^\]]*\] )?"),
    fatal="EngineCore encountered a fatal error",
    clock="%m-%d %H:%M:%S",
    imported=re.compile(r"^(?:\([^)]*\) )?INFO (\d\d-\d\d \d\d:\d\d:\d\d) .*Initializing a V1 LLM engine"),
    seconds={
        "load": re.compile(r"^(?!\([^)]*TP[1-9]).*Model loading took .* memory and ([\d.]+) seconds"),
        "compile": re.compile(r"^(?!\([^)]*TP[1-9]).*torch\.compile took ([\d.]+) s in total"),
        "graphs": re.compile(r"^(?!\([^)]*TP[1-9]).*Graph capturing finished in ([\d.]+) secs"),
    },
    causes={
        re.compile(r"CUDA Error: out of memory at .*cumem_allocator"): (
            "the GPU had too little free memory for it to start or wake up beside the trainer. Lower "
            "engine.gpu_memory_utilization (--vllm-gpu-memory-utilization), or leave launcher.offload_train on, so that the "
            "trainer keeps nothing there"
        ),
    },
)


class VllmConnection(Connection):
    dialect: ClassVar[HttpDialect] = HttpDialect(
        program="vLLM",
        generate="/inference/v1/generate",
        words=frozenset({("GET", "/health"), ("POST", LOAD), ("POST", UNLOAD)}),
    )

    @classmethod
    def columns(cls, reply: Any) -> Any:
        try:
            (choice,) = reply["choices"]
            token_ids = np.asarray(choice["token_ids"] or (), np.int64)
            rows = (choice["logprobs"] or {}).get("content") or []
            content = TokenRows.of(rows, {"token_id": np.int32, "logprob": np.float32})
            return {**reply, "choices": [{**choice, "token_ids": token_ids, "logprobs": {"content": content}}]}
        except (*INVALID, AttributeError):
            return reply

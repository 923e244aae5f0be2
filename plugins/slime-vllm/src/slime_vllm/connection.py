"""Connection to a server of vLLM."""

from __future__ import annotations

import re
from typing import ClassVar, Final

from slime_serving.connection import Connection, HttpDialect
from slime_serving.server_process import LogFormat
from slime_vllm.adapter import LOAD

VLLM_LOG: Final = LogFormat(
    stamp=re.compile(r"^(\([A-Za-z0-9_]+ pid=\d+\) )?([A-Z]+ \d\d-\d\d \d\d:\d\d:\d\d \[[^\]]*\] )?"),
    fatal="EngineCore encountered a fatal error",
)


class VllmConnection(Connection):
    dialect: ClassVar[HttpDialect] = HttpDialect(
        program="vLLM", generate="/inference/v1/generate", words=frozenset({("GET", "/health"), ("POST", LOAD)})
    )

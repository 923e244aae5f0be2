"""Connection to a server of SGLang, or to sglang-router."""

from __future__ import annotations

from typing import Any, ClassVar, Final

import numpy as np

from slime_serving.connection import Connection, HttpDialect
from slime_serving.running import INVALID, TokenRows

ROWS: Final = "output_token_logprobs"


class SglangConnection(Connection):
    dialect: ClassVar[HttpDialect] = HttpDialect(
        program="SGLang",
        generate="/generate",
        words=frozenset({("GET", "/health"), ("POST", "/flush_cache"), ("POST", "/freeze_gc")}),
        code_header="x-smg-error-code",
        not_passed_on="call_upstream_request_error",
    )

    @classmethod
    def columns(cls, reply: Any) -> Any:
        try:
            meta = reply["meta_info"]
            return {"meta_info": {**meta, ROWS: TokenRows.of(meta[ROWS], {0: np.float32, 1: np.int32})}}
        except INVALID:
            return reply

"""Connection to a server of SGLang, or to sglang-router."""

from __future__ import annotations

from typing import ClassVar

from slime_serving.connection import Connection, HttpDialect


class SglangConnection(Connection):
    dialect: ClassVar[HttpDialect] = HttpDialect(
        program="SGLang",
        generate="/generate",
        words=frozenset({("GET", "/health"), ("POST", "/flush_cache"), ("POST", "/freeze_gc")}),
        code_header="x-smg-error-code",
        not_passed_on="call_upstream_request_error",
    )

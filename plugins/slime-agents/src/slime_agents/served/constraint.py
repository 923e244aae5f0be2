"""Constraint: what a response must match, as a structural tag of XGrammar, which engines with guided decoding accept."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from slime_agents.served.dialogue import BadCall

Tools: TypeAlias = Sequence[Mapping[str, Any]]
"""As chat completions have them."""
ANY_OBJECT: Final[Mapping[str, Any]] = {"type": "object"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraint:
    parameter: str
    """The parameter of the call that requires it."""
    value: Any
    """Its value, for errors."""
    structural_tag: str
    """JSON text."""

    @classmethod
    def of_format(cls, parameter: str, value: Mapping[str, Any], schema: Any, tools: Tools | None) -> Constraint | None:
        """The response is a JSON text, or calls of the tools if there are any; None: plain text. `schema`: the one of
        `json_schema`. BadCall for another type, and for what is no schema."""
        kind = value.get("type")
        if kind == "text":
            return None
        if kind not in ("json_object", "json_schema"):
            raise BadCall(
                f"{parameter}: type {kind!r:.40}: there are text, json_object and json_schema", parameter=parameter
            )
        schema = ANY_OBJECT if kind == "json_object" else schema
        if not isinstance(schema, Mapping | bool):
            raise BadCall(f"{parameter}: {schema!r:.80} is no JSON schema", parameter=parameter)
        rule: dict[str, Any] = {"type": "json_schema", "json_schema": schema}
        if tools:
            rule = {"type": "or", "elements": [calls_of([tool["function"] for tool in tools]), rule]}
        return cls(parameter=parameter, value=value, structural_tag=tag_text(rule))

    @classmethod
    def of_calls(cls, value: Any, tools: Tools | None, *, name: str | None, one: bool = False) -> Constraint:
        """The response is calls of the tools. `name`: only this tool; `one`: one call. BadCall if there is no such tool."""
        offered = [tool["function"] for tool in tools or ()]
        called = [function for function in offered if name in (None, function.get("name"))]
        if not called:
            names = ", ".join(str(function.get("name")) for function in offered) or "no tools"
            raise BadCall(
                f"tool_choice = {value!r:.80}: there is no such tool. The call has {names}", parameter="tool_choice"
            )
        return cls(parameter="tool_choice", value=value, structural_tag=tag_text(calls_of(called, one=one)))


def tag_text(rule: Mapping[str, Any]) -> str:
    return json.dumps({"type": "structural_tag", "format": rule})


def calls_of(functions: Tools, *, one: bool = False) -> dict[str, Any]:
    """One call or several, in the format that `dialogue` parses, with arguments of the functions' schemas."""
    return {
        "type": "tags_with_separator",
        "tags": [
            {
                "type": "tag",
                "begin": f'<tool_call>\n{{"name": {json.dumps(function.get("name"), ensure_ascii=False)}, "arguments": ',
                "content": {"type": "json_schema", "json_schema": function.get("parameters") or ANY_OBJECT},
                "end": "}\n</tool_call>",
            }
            for function in functions
        ],
        "separator": "\n",
        "at_least_one": True,
        "stop_after_first": one,
    }

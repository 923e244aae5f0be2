"""ChatHarness: a chat loop with tool calls, in the run's own process.

The library's `null` harness does the same in a separate process for every episode, with its own installed environment. Here an
episode only costs its model calls.
"""

from __future__ import annotations

import json
from contextlib import AsyncExitStack
from typing import Any, Final

import openai
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp

DONE: Final = vf.ProgramResult(exit_code=0, stdout="", stderr="")


class ChatHarnessConfig(vf.HarnessConfig):
    pass


class ChatHarness(vf.Harness[ChatHarnessConfig]):
    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace[Any, Any, Any],
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        messages = first_messages(*self.resolve_prompt(data))
        servers = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
        async with AsyncExitStack() as stack:
            # No retries: a repeated call would be another turn. `timeout_s` ends the whole episode.
            client = await stack.enter_async_context(
                openai.AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0, timeout=None)
            )
            tools, dispatch, connections = await connect_mcp({"mcpServers": servers}, stack)
            while True:
                try:
                    response = await client.chat.completions.create(
                        model=ctx.model, messages=messages, **({"tools": tools} if tools else {})
                    )
                except openai.APIError as error:
                    return vf.ProgramResult(exit_code=1, stdout="", stderr=str(error))
                message = response.choices[0].message
                messages.append(message.model_dump(exclude_none=True))
                if not message.tool_calls:
                    return DONE
                for call in message.tool_calls:
                    result = await called(call.function, dispatch, connections)
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


def first_messages(system: str | None, prompt: Any) -> list[Any]:
    messages: list[Any] = [{"role": "system", "content": system}] if system else []
    if isinstance(prompt, str):
        return [*messages, {"role": "user", "content": prompt}]
    return [*messages, *(message_to_wire(message) for message in prompt or ())]


async def called(function: Any, dispatch: Any, connections: Any) -> Any:
    """The tool's result as content of a message, or a text that states what is wrong with the call."""
    try:
        arguments = json.loads(function.arguments or "{}")
    except (ValueError, RecursionError) as error:
        return f"error: the arguments are no JSON: {error}"
    if not isinstance(arguments, dict):
        return f"error: the arguments must be an object, not {type(arguments).__name__}"
    if function.name not in dispatch:
        return f"error: there is no tool {function.name!r}; there are {', '.join(dispatch) or 'none'}"
    return await call_mcp(connections, dispatch, function.name, arguments)

"""A tool that runs Python code in a process of its own, as a registry that a generate function imports."""

import asyncio
import sys

TOOL_CONFIGS = {"max_turns": 3, "max_tool_calls": 2, "timeout": 20.0}
SEMAPHORE = asyncio.Semaphore(2)


class ToolRegistry:
    def get_tool_specs(self):
        return [
            {
                "type": "function",
                "function": {
                    "name": "code_interpreter",
                    "description": "Runs Python code.",
                    "parameters": {
                        "type": "object",
                        "properties": {"code": {"type": "string"}},
                        "required": ["code"],
                    },
                },
            }
        ]

    async def execute_tool(self, name, arguments):
        if name != "code_interpreter":
            return f"Error: no tool {name}"
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-I",
            "-c",
            arguments["code"],
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        try:
            output, _ = await asyncio.wait_for(process.communicate(), TOOL_CONFIGS["timeout"])
        except TimeoutError:
            process.kill()
            return "Error: timeout"
        return output.decode(errors="replace")[:16].strip()


tool_registry = ToolRegistry()

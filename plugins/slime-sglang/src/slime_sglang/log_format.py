"""How SGLang logs."""

from __future__ import annotations

import re
from typing import Final

from slime_serving.server_process import LogFormat

FIRST_RANK: Final = r"^\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)(?: TP0)?\] "

SGLANG_LOG: Final = LogFormat(
    stamp=re.compile(r"^\[[^\]]*\] "),
    fatal="hit an exception: ",
    clock="%Y-%m-%d %H:%M:%S",
    imported=re.compile(f"{FIRST_RANK}Init torch distributed begin"),
    seconds={
        "connect": re.compile(r"^\[[^\]]*\d(?: TP0)?\] Init torch distributed ends\. elapsed=([\d.]+) s"),
        "load": re.compile(r"^\[[^\]]*\d(?: TP0)?\] Load weight end\. elapsed=([\d.]+) s"),
        "graphs": re.compile(r"^\[[^\]]*\d(?: TP0)?\] Capture .* graph end\. elapsed=([\d.]+) s", re.IGNORECASE),
    },
    causes={
        re.compile(r"\[torch_memory_saver\.cpp\] .*\(out of memory\).* func=resume"): (
            "the GPU had too little free memory for it to wake up beside the trainer. Lower engine.mem_fraction_static "
            "(--sglang-mem-fraction-static), or leave launcher.offload_train on, so that the trainer keeps nothing there"
        ),
    },
)

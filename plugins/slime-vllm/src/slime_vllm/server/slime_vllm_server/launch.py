"""The server's main program: `python -m slime_vllm_server.launch`, its arguments as JSON in stdin's first line.

The command line has no secrets. Stdin stays open as long as the parent lives; when it closes, the whole process group is
killed.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Mapping
from typing import Any


def die_with_parent() -> None:
    """Ends the process group when stdin does: the parent holds its other end, and no process holds it longer."""

    def wait() -> None:
        # Not through sys.stdin: a thread that waits in it holds its lock, and the interpreter would crash at its end.
        while os.read(descriptor, 1):
            pass
        os.killpg(os.getpgrp(), signal.SIGKILL)

    descriptor = sys.stdin.fileno()
    threading.Thread(target=wait, name="parent-watch", daemon=True).start()


def words_of(options: Mapping[str, Any]) -> list[str]:
    """The options as vLLM's command line has them."""
    words: list[str] = []
    for name, value in options.items():
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            words.append(flag if value else "--no-" + name.replace("_", "-"))
        elif isinstance(value, list):
            words += [flag, *map(str, value)]
        else:
            words += [flag, json.dumps(value) if isinstance(value, dict) else str(value)]
    return words


def main() -> None:
    options = json.loads(sys.stdin.buffer.readline())
    die_with_parent()

    import uvloop
    from vllm.entrypoints.launchers.api_server.entry import run_server
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    cli_env_setup()
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(words_of(options))
    validate_parsed_serve_args(args)
    uvloop.run(run_server(args))


if __name__ == "__mp_main__":
    # The engine and its workers are started by importing this module once more.
    from slime_vllm_server.idle_cpu import rest_between_looks

    rest_between_looks()

if __name__ == "__main__":
    main()

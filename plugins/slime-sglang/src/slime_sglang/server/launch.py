"""The server's main program: `python -m slime_sglang.server.launch HOOK...`, its arguments as JSON in stdin's first line.

The command line has no secrets. Stdin stays open as long as the parent lives; when it closes, the whole process group is
killed. The processes that SGLang spawns import this module again with the same command line, so they get the stubs and the
hooks.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Final

ON_CPU: Final = os.environ.get("SGLANG_USE_CPU_ENGINE") == "1"
"""SGLang's own environment variable."""

if ON_CPU:
    from slime_sglang.server.stubs import install_stubs

    install_stubs()

from slime_sglang.server.hooks import missing_targets, register_hooks  # noqa: E402 - what is stubbed must be so before SGLang is imported
from slime_sglang.server.parent import die_with_parent  # noqa: E402

HOOKS: Final = sys.argv[1:]
register_hooks(HOOKS, on_cpu=ON_CPU)


def main() -> None:
    options = json.loads(sys.stdin.buffer.readline())
    die_with_parent()

    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs

    load_plugins()
    for hook, target in missing_targets(HOOKS):
        message = f"slime: this SGLang has no {target}, which slime hooks for: {hook.purpose} ({hook.when})."
        if hook.essential:
            sys.exit(message)
        print(message, file=sys.stderr, flush=True)
    run_server(ServerArgs(**options))


if __name__ == "__main__":
    main()

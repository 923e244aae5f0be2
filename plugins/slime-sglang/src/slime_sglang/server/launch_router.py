"""The router's main program: `python -m slime_sglang.server.launch_router`, its RouterArgs as JSON in stdin's first line."""

from __future__ import annotations

import dataclasses
import difflib
import json
import sys

from slime_sglang.server.parent import die_with_parent


def main() -> None:
    options = json.loads(sys.stdin.buffer.readline())
    die_with_parent()

    from sglang_router.launch_router import launch_router
    from sglang_router.router_args import RouterArgs

    known = [field.name for field in dataclasses.fields(RouterArgs)]
    for name in options:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=3)
            sys.exit(
                f"engine.router_options.{name}: sglang-router has no such option; close match: {', '.join(close)}."
            )
    launch_router(RouterArgs(**options))


if __name__ == "__main__":
    main()

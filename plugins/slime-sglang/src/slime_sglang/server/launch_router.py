"""The router's main program: `python -m slime_sglang.server.launch_router`, its RouterArgs as JSON in stdin's first line."""

from __future__ import annotations

import json
import sys

from slime_sglang.server.parent import die_with_parent


def main() -> None:
    options = json.loads(sys.stdin.buffer.readline())
    die_with_parent()

    from sglang_router.launch_router import launch_router
    from sglang_router.router_args import RouterArgs

    launch_router(RouterArgs(**options))


if __name__ == "__main__":
    main()

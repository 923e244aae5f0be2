"""The console script of a server."""

from __future__ import annotations

import sys
from collections.abc import Callable

from slime_core.errors import SlimeError


def run_command(app: Callable[[], object]) -> None:
    """Runs `app`. Prints a SlimeError as one paragraph, and exits with its exit code."""
    try:
        app()
    except SlimeError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)

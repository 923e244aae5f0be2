"""Environments of the verifiers library for slime. To that library, this package is a harness too, named slime_verifiers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slime_verifiers.harness import ChatHarness

__all__ = ["ChatHarness"]


def __getattr__(name: str) -> Any:
    # Not before it is asked for: verifiers takes seconds to import, and need not be installed.
    if name == "ChatHarness":
        from slime_verifiers.harness import ChatHarness

        return ChatHarness
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""How a conversation is named in HTTP, by sglang-router's convention."""

from __future__ import annotations

from typing import Final

SESSION_KEY: Final = "x-smg-routing-key"
"""The header. It is forwarded, so that a router behind this one sees it too."""

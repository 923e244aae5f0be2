"""Attention that is more than a softmax over keys, and by which keyword arguments models of transformers ask for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

VARIANTS: Final = ("softcap", "s_aux", "head_mask", "position_bias")


def variants_asked(options: Mapping[str, Any]) -> list[str]:
    """Keyword arguments of an attention call that change its scores. An implementation that ignored them would be wrong."""
    return [name for name in VARIANTS if options.get(name) is not None]

"""Warnings of Megatron that come up in every run with this backend."""

from __future__ import annotations

import warnings
from typing import Final

KNOWN: Final = (
    # The fallback without these packages is intended.
    "Transformer Engine and Apex are not installed",
    "Apex is not installed",
    # About its own default.
    "full scope is deprecated",
    # About how it reads torch_dist.
    "`load_state_dict` is deprecated",
)


def silence_known_warnings() -> None:
    """Silences warnings of Megatron's modules only."""
    for message in KNOWN:
        warnings.filterwarnings("ignore", message, module=r"megatron\.core\.")

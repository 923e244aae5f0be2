"""What Megatron warns of wherever it is used as it is here."""

from __future__ import annotations

import warnings
from typing import Final

KNOWN: Final = (
    # What it does without them is what is wanted.
    "Transformer Engine and Apex are not installed",
    "Apex is not installed",
    # Of its own default.
    "full scope is deprecated",
    # How it reads torch_dist.
    "`load_state_dict` is deprecated",
)


def silence_known_warnings() -> None:
    """Of Megatron's modules, and these alone."""
    for message in KNOWN:
        warnings.filterwarnings("ignore", message, module=r"megatron\.core\.")

"""Actions of /weights_checker, and keys of its responses, by which a server reports the parts that it holds."""

from __future__ import annotations

from typing import Final

PARTS: Final = "slime_parts"
"""Action of /weights_checker: each rank's places, without digests."""
DIGESTS: Final = "slime_part_digests"
"""Action of /weights_checker: each rank's places with digests of their content."""
REFUSED: Final = "refused"
"""Key instead of a place, with the reason of an error: the other ranks would wait for the response of a rank that raises."""
SKIPPED: Final = "skipped"
"""Key instead of a place, with prefixes of names that the model does not load, separated by spaces."""
OF_DRAFTS: Final = "draft."
"""Prefix of the names that SGLang adds for the draft of speculative decoding."""

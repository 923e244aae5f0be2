"""UnknownText: the part of a text that the tokenizer cannot express, which the model would not see."""

from __future__ import annotations

import math
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from slime_core.errors import DataError
from slime_sources.rendering.plain_encoding import encoded

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from transformers import PreTrainedTokenizerBase

RARE: Final = "\U00012000"
"""A cuneiform sign: only a tokenizer of bytes expresses it."""


class UnknownText:
    """Costs nothing for a tokenizer of bytes, which expresses every text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._backend: Any = tokenizer.backend_tokenizer if tokenizer.is_fast else None

    def share(self, text: str, token_ids: npt.NDArray[np.int32]) -> float:
        """Share of the tokens that are unknown; for a tokenizer without an unknown token, of the characters that are lost."""
        if self._is_of_bytes:
            return 0.0
        if self._unknown:
            found = sum(map(self._unknown_ids.__contains__, token_ids.tolist()))
            # The text may name the token itself.
            known = sum(map(text.count, self._unknown)) if found else 0
            return max(0, found - known) / max(1, len(token_ids))
        return sum(map(text.count, self._lost(text, token_ids.tolist()))) / max(1, len(text))

    def refuse(self, text: str, token_ids: npt.NDArray[np.int32], origin: str, max_share: float) -> str | None:
        """DataError, which begins with the origin, if more than `max_share` of the text is unknown. Returns what is unknown, if
        anything is."""
        share = self.share(text, token_ids)
        if not share:
            return None
        examples = ", ".join(map(repr, self.examples(text))) or "some of its words"
        what = f"the tokenizer cannot express {share:.2%} of the text, such as {examples}"
        if share > max_share:
            raise DataError(
                f"{origin}: {what}; the model would not see it. Use a model that has these characters, or "
                f"accept it: --max-unknown-share {min(1, math.ceil(share * 1000) / 1000):g}"
            )
        return what

    def examples(self, text: str, count: int = 5) -> list[str]:
        """Some characters that cannot be expressed."""
        characters = [one for one in dict.fromkeys(text) if not one.isspace()]
        return [one for one in characters if self.share(one, encoded(self._tokenizer, one))][:count]

    def _lost(self, text: str, token_ids: list[int]) -> list[str]:
        normalizer = None if self._backend is None else self._backend.normalizer
        normal = text if normalizer is None else normalizer.normalize_str(text)
        back = set(self._tokenizer.decode(token_ids, skip_special_tokens=False))
        return [one for one in set(normal) - back if not one.isspace()]

    @cached_property
    def _is_of_bytes(self) -> bool:
        if self._backend is None:
            return False
        from tokenizers.pre_tokenizers import ByteLevel

        alphabets = (ByteLevel.alphabet(), [f"<0x{byte:02X}>" for byte in range(256)])
        whole = any(all(self._backend.token_to_id(piece) is not None for piece in pieces) for pieces in alphabets)
        return whole and RARE in self._tokenizer.decode(encoded(self._tokenizer, RARE).tolist())

    @cached_property
    def _unknown(self) -> dict[str, int]:
        """Unknown tokens and their ids."""
        declared = {self._tokenizer.unk_token, getattr(getattr(self._backend, "model", None), "unk_token", None)}
        ids = {token: self._tokenizer.convert_tokens_to_ids(token) for token in declared if token is not None}
        return {token: number for token, number in ids.items() if number is not None}

    @cached_property
    def _unknown_ids(self) -> frozenset[int]:
        return frozenset(self._unknown.values())

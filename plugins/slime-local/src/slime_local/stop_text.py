"""Stop strings: found by decoding the last few tokens, and only for rows that have any."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from slime_core.errors import EngineError
from slime_core.types.completion import SamplingParams


class StopText:
    """The tokenizer is loaded when the first request with stop strings comes."""

    def __init__(self, model_path: Path, trust_remote_code: bool) -> None:
        self._model_path = model_path
        self._trust_remote_code = trust_remote_code

    @cached_property
    def _tokenizer(self) -> PreTrainedTokenizerBase:
        try:
            return AutoTokenizer.from_pretrained(
                self._model_path, trust_remote_code=self._trust_remote_code, local_files_only=True
            )
        except (OSError, ValueError) as error:
            raise EngineError(
                f"engine local: a request has stop strings, which need a tokenizer, and {self._model_path} has none "
                f"that loads ({error}). Use stop_token_ids, or add the tokenizer's files."
            ) from error

    def prepare(self) -> None:
        """Raises EngineError if there is no tokenizer."""
        _ = self._tokenizer

    @staticmethod
    def tail_length(params: SamplingParams) -> int:
        """Tokens at the end of a response that any stop string ending in its last token fits in.

        A token that is not skipped holds at least one byte; one more covers the space that some tokenizers take off
        the first token they decode, three more a character cut in two.
        """
        return max(len(text.encode()) for text in params.stop) + 4

    def found(self, tail: npt.NDArray[np.int64], params: SamplingParams) -> bool:
        """Whether a stop string is in the text of `tail`: it may end inside the last token."""
        text = self._tokenizer.decode(tail.tolist(), skip_special_tokens=params.skip_special_tokens)
        return any(stop in text for stop in params.stop)

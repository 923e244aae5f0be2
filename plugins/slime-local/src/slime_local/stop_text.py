"""Stop strings: found by decoding the last few tokens, and only for rows that have any."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from slime_core.errors import EngineRefused
from slime_core.types.completion import SamplingParams
from slime_local.request_row import RequestRow
from slime_local.running_batch import RunningBatch


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
            raise EngineRefused(
                f"engine local: a request has stop strings, which need a tokenizer, and {self._model_path} has none "
                f"that loads ({error}). Use stop_token_ids, or add the tokenizer's files."
            ) from error

    def prepare(self) -> None:
        """Raises EngineRefused if there is no tokenizer."""
        _ = self._tokenizer

    def ended_rows(self, rows: Sequence[RequestRow], slots: RunningBatch) -> list[int]:
        """Places of the rows whose last token completes one of their stop strings."""
        asking = [
            index
            for index, row in enumerate(rows)
            if row.request.sampling.stop
            and slots.end - row.response_start >= max(1, row.request.sampling.min_new_tokens)
        ]
        if not asking:
            return []
        tails = [
            min(self._tail_length(rows[index].request.sampling), slots.end - rows[index].response_start)
            for index in asking
        ]
        first = slots.end - max(tails)
        tokens = slots.tokens(torch.tensor(asking, device=slots.device), first, slots.end).cpu().numpy()
        return [
            index
            for index, row_tokens, tail in zip(asking, tokens, tails, strict=True)
            if self._found(row_tokens[-tail:], rows[index].request.sampling)
        ]

    @staticmethod
    def _tail_length(params: SamplingParams) -> int:
        """Tokens at the end of a response that any stop string ending in its last token fits in.

        A token that is not skipped holds at least one byte; one more covers the space that some tokenizers take off
        the first token they decode, three more a character cut in two.
        """
        return max(len(text.encode()) for text in params.stop) + 4

    def _found(self, tail: npt.NDArray[np.int64], params: SamplingParams) -> bool:
        """Whether a stop string is in the text of `tail`: it may end inside the last token."""
        text = self._tokenizer.decode(tail.tolist(), skip_special_tokens=params.skip_special_tokens)
        return any(stop in text for stop in params.stop)

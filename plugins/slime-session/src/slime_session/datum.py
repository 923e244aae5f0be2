"""Datum: a sequence with its credit, for training on what did not come from the run's own rollouts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from slime_core.errors import DataError
from slime_core.types.batch import Float32, TokenColumns
from slime_core.types.prompt import Prompt
from slime_core.types.sample import Sample, SampleGroup

Numbers: TypeAlias = Sequence[float] | npt.NDArray[np.floating]
NumberT = TypeVar("NumberT", bound=np.generic)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Datum:
    """T = P + R tokens, P >= 1 of the prompt, R >= 1 of the response. Each is a rollout of its own.

    With `targets` there is no response: T = P, and R = P K targets take the place of response tokens everywhere else.
    """

    tokens: Sequence[int] | npt.NDArray[np.integer]
    """(T,)"""
    prompt_length: int
    """P"""
    targets: npt.NDArray[np.integer] | None = None
    """(P, K): K tokens after each prefix of the prompt, whose log-probs are computed, from one forward. K >= 1 may differ
    between datums, and targets may be equal. All columns (R,) have them position by position. None: the response's tokens."""
    advantages: Numbers | float = 1.0
    """(R,), or one number for all response tokens. A loss that reads no advantages ignores them."""
    mask: Sequence[int] | npt.NDArray[np.integer] | None = None
    """(R,) 1 = trained; None: all are."""
    log_probs: Numbers | None = None
    """(R,) nats, under the policy that sampled the tokens, at the run's temperature: the old log-probs of losses with an
    importance ratio; None: no policy sampled them."""
    loss_weights: Numbers | None = None
    """(R,) by which the loss of each token is multiplied before all are summed; None: the recipe's aggregation."""

    @property
    def response_length(self) -> int:
        """R"""
        if self.targets is not None:
            return self.targets.size
        return len(self.tokens) - self.prompt_length


def groups_of(datums: Sequence[Datum], *, first: int) -> list[SampleGroup]:
    """A group for each datum, numbered from `first`. DataError for lengths that do not fit."""
    return [group_of(datum, first + place, f"datums[{place}]") for place, datum in enumerate(datums)]


def group_of(datum: Datum, number: int, where: str) -> SampleGroup:
    length = datum.response_length
    if datum.targets is not None:
        require_targets(datum, where)
    elif datum.prompt_length < 1 or length < 1:
        raise DataError(
            f"{where}: {len(datum.tokens)} tokens with prompt_length {datum.prompt_length}: both prompt and response need one."
        )
    tokens = np.asarray(datum.tokens, np.int32)
    if datum.targets is not None:
        tokens = np.concatenate([tokens, datum.targets.astype(np.int32).ravel()])
    prompt = Prompt(group_index=number, text="", token_ids=tokens[: datum.prompt_length], origin=where)
    sample = Sample(
        index=number,
        group_index=number,
        rollout_id=number,
        prompt=prompt,
        tokens=tokens,
        prompt_length=datum.prompt_length,
        loss_mask=np.ones(length, np.uint8)
        if datum.mask is None
        else column(datum.mask, length, f"{where}.mask", np.uint8),
        rollout_log_probs=column(
            0.0 if datum.log_probs is None else datum.log_probs, length, f"{where}.log_probs", np.float32
        ),
    )
    return SampleGroup(prompt=prompt, samples=(sample,))


def require_targets(datum: Datum, where: str) -> None:
    targets, length = datum.targets, len(datum.tokens)
    assert targets is not None
    if not (targets.ndim == 2 and targets.size and len(targets) == length == datum.prompt_length):
        raise DataError(
            f"{where}.targets: shape {targets.shape} for {length} tokens with prompt_length {datum.prompt_length}: with "
            "targets all tokens are the prompt's, and each has K >= 1 targets."
        )


def columns_of(datums: Sequence[Datum]) -> TokenColumns:
    """(M,) columns over the response tokens of all datums. DataError if only some have log-probs or loss weights."""

    def joined(name: str, values: Sequence[Numbers | float | None]) -> Float32 | None:
        lacking = [place for place, value in enumerate(values) if value is None]
        if len(lacking) == len(values):
            return None
        if lacking:
            raise DataError(f"datums[{lacking[0]}] has no {name}, and others have: give them for all, or for none.")
        return np.concatenate(
            [
                column(value, datum.response_length, f"datums[{place}].{name}", np.float32)
                for place, (datum, value) in enumerate(zip(datums, values, strict=True))
                if value is not None
            ]
        )

    advantages = joined("advantages", [datum.advantages for datum in datums])
    return TokenColumns(
        advantages=advantages,
        returns=advantages,
        old_log_probs=joined("log_probs", [datum.log_probs for datum in datums]),
        loss_weight=joined("loss_weights", [datum.loss_weights for datum in datums]),
    )


def column(values: npt.ArrayLike, length: int, where: str, dtype: type[NumberT]) -> npt.NDArray[NumberT]:
    """(length,), a single number repeated. DataError for another length."""
    given = np.asarray(values, dtype)
    if given.ndim and given.shape != (length,):
        raise DataError(f"{where}: shape {given.shape}, and there are {length} response tokens.")
    return np.broadcast_to(given, (length,)).copy()

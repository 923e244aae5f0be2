"""Drivers of slime-filters: the filters, and their options."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pydantic import Field, model_validator

from slime_core.contracts.driver import DriverConfig
from slime_core.contracts.example import Example, FilterExample
from slime_core.contracts.filter import BufferFilter, BufferFilterDriver, FilterDriver, GroupFilter


class GroupFilterConfig(DriverConfig):
    """Options of every group filter."""

    keep_when_insufficient: bool = False
    """Keep a rejected group if the remaining candidates would not fill the batch."""


class NonzeroStdConfig(GroupFilterConfig):
    min_std: float = Field(1e-6, ge=0, allow_inf_nan=False)
    """Largest standard deviation of rewards that is dropped; the default drops only groups with equal rewards."""


class PassRateBandConfig(GroupFilterConfig):
    min_pass_rate: float = Field(0.1, ge=0, le=1)
    """Smallest share of samples that pass, inclusive: below it a prompt is too hard to learn from."""
    max_pass_rate: float = Field(0.9, ge=0, le=1)
    """Largest share of samples that pass, inclusive: above it the model has learned the prompt."""
    pass_reward: float = Field(1.0, allow_inf_nan=False)
    """A sample passes with this reward or more."""

    @model_validator(mode="after")
    def _check_band(self) -> PassRateBandConfig:
        if self.min_pass_rate > self.max_pass_rate:
            raise ValueError(
                f"min_pass_rate = {self.min_pass_rate} is above max_pass_rate = {self.max_pass_rate}: nothing would pass"
            )
        return self


class LengthConfig(GroupFilterConfig):
    min_response_len: int = Field(0, ge=0)
    """Smallest number of tokens of each response in a group."""
    max_response_len: int | None = Field(None, gt=0)
    """Largest number of tokens of each response in a group; by default unlimited."""
    max_truncated_ratio: float = Field(1.0, ge=0, le=1)
    """Largest share of responses that reached the length limit, inclusive."""

    @model_validator(mode="after")
    def _check_bounds(self) -> LengthConfig:
        if self.min_response_len == 0 and self.max_response_len is None and self.max_truncated_ratio == 1.0:
            raise ValueError(
                "set min_response_len, max_response_len or max_truncated_ratio: otherwise nothing would be dropped"
            )
        if self.max_response_len is not None and self.min_response_len > self.max_response_len:
            raise ValueError(
                f"min_response_len = {self.min_response_len} is above max_response_len = {self.max_response_len}: "
                "nothing would pass"
            )
        return self


class PriorityConfig(DriverConfig):
    key: str = Field("priority", min_length=1)
    """Key of the prompt's metadata with its priority, a number; the highest comes first."""
    default: float | None = Field(None, allow_inf_nan=False)
    """Priority of prompts without that key; by default they are an error."""


class OldestFirstConfig(DriverConfig):
    max_behind: int | None = Field(None, ge=0)
    """Limit of staleness in policy versions, beyond which items come last; by default the run's max_staleness."""


class NonzeroStd(FilterDriver):
    """Drops groups whose samples all have the same reward: their advantages are zero (DAPO's dynamic sampling)."""

    Config = NonzeroStdConfig

    @classmethod
    def build(cls, config: NonzeroStdConfig) -> GroupFilter:
        from slime_filters.nonzero_std import NonzeroStdFilter

        return NonzeroStdFilter(min_std=config.min_std, keep_when_insufficient=config.keep_when_insufficient)


class PassRateBand(FilterDriver):
    """Drops prompts that are too hard or too easy for the current policy."""

    Config = PassRateBandConfig

    @classmethod
    def build(cls, config: PassRateBandConfig) -> GroupFilter:
        from slime_filters.pass_rate_band import PassRateBandFilter

        return PassRateBandFilter(
            min_pass_rate=config.min_pass_rate,
            max_pass_rate=config.max_pass_rate,
            pass_reward=config.pass_reward,
            keep_when_insufficient=config.keep_when_insufficient,
        )


class Length(FilterDriver):
    """Drops groups by the length of their responses."""

    Config = LengthConfig

    @classmethod
    def build(cls, config: LengthConfig) -> GroupFilter:
        from slime_filters.length import LengthFilter

        return LengthFilter(
            min_response_len=config.min_response_len,
            max_response_len=config.max_response_len,
            max_truncated_ratio=config.max_truncated_ratio,
            keep_when_insufficient=config.keep_when_insufficient,
        )

    @classmethod
    def examples(cls, folder: Path) -> Sequence[Example]:
        return [
            Example(options={"min_response_len": 1, "max_response_len": 8}),
            Example(options={"max_truncated_ratio": 0.5, "keep_when_insufficient": True}),
        ]


class OverlongFilter(FilterDriver):
    """Keeps all groups, but does not train on responses that reached the length limit."""

    @classmethod
    def build(cls, config: DriverConfig) -> GroupFilter:
        from slime_filters import overlong_filter

        return overlong_filter.OverlongFilter()


class Priority(BufferFilterDriver):
    """Takes items from the buffer by a number in the prompts' metadata, highest first."""

    Config = PriorityConfig

    @classmethod
    def build(cls, config: PriorityConfig) -> BufferFilter:
        from slime_filters.priority import PriorityFilter

        return PriorityFilter(key=config.key, default=config.default)

    @classmethod
    def examples(cls, folder: Path) -> Sequence[Example]:
        return [
            FilterExample(metadata=({"priority": 1}, {"priority": 3.5}, {"priority": -2})),
            FilterExample(options={"default": 0.0}, metadata=({}, {"priority": 1})),
        ]


class FreshFirst(BufferFilterDriver):
    """Takes items from the buffer that the newest policy generated, so that training stays as on-policy as possible."""

    @classmethod
    def build(cls, config: DriverConfig) -> BufferFilter:
        from slime_filters.fresh_first import FreshFirstFilter

        return FreshFirstFilter()


class OldestFirst(BufferFilterDriver):
    """Takes items from the buffer that will soon be too old, so that few are dropped."""

    Config = OldestFirstConfig

    @classmethod
    def build(cls, config: OldestFirstConfig) -> BufferFilter:
        from slime_filters.oldest_first import OldestFirstFilter

        return OldestFirstFilter(max_behind=config.max_behind)

    @classmethod
    def examples(cls, folder: Path) -> Sequence[Example]:
        return [FilterExample(), FilterExample(options={"max_behind": 1})]

"""Drivers of slime-search-r1. The generator and the reward are imported when they are built."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from slime_core.contracts.generator import Generator, GeneratorDriver
from slime_core.contracts.reward import Reward, RewardDriver
from slime_search_r1.config import ExactMatchConfig, SearchR1Config

if TYPE_CHECKING:
    from slime_core.contracts.example import Example


class SearchR1(GeneratorDriver):
    """Turns in which the model thinks, searches and reads, until it answers. What it reads is not trained."""

    Config = SearchR1Config

    @classmethod
    def build(cls, config: SearchR1Config) -> Generator:
        from slime_search_r1.build import build_generator

        return build_generator(config)

    @classmethod
    def examples(cls, folder: Path) -> Sequence[Example]:
        from slime_core.contracts.example import Example

        corpus = folder / "corpus.jsonl"
        corpus.write_text(json.dumps({"title": "two", "text": "1+1"}) + "\n")
        return [Example(options={"corpus": str(corpus)}), Example(options={"corpus": str(corpus), "max_turns": 1})]


class ExactMatch(RewardDriver):
    """1 if the last <answer> equals the label, or one of its list, without case, punctuation and articles."""

    Config = ExactMatchConfig
    reward_key: ClassVar[str | None] = "score"

    @classmethod
    def build(cls, config: ExactMatchConfig) -> Reward:
        from slime_search_r1.exact_match import ExactMatchReward

        return ExactMatchReward(config.format_score)

    @classmethod
    def examples(cls, folder: Path) -> Sequence[Example]:
        from slime_search_r1.examples import EXACT_MATCH

        return EXACT_MATCH

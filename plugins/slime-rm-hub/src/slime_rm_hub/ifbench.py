"""Reward ifbench: whether a response follows every instruction of its prompt. Uses the original checkers of IFEval
(arXiv:2311.07911) and IFBench (arXiv:2507.02833), by the names in their data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import langdetect
import nltk
from if_verifiable.ifeval.instructions_registry import INSTRUCTION_DICT as IFEVAL

from slime_core.contracts.reward import Reward
from slime_core.errors import RewardError, unknown_name
from slime_core.types.prompt import Prompt
from slime_core.types.sample import Sample, SampleGroup
from slime_rm_hub.label import place
from slime_rm_hub.response import Graded

NLTK_DATA: Final = {
    "punkt": "tokenizers/punkt",
    "punkt_tab": "tokenizers/punkt_tab",
    "averaged_perceptron_tagger_eng": "taggers/averaged_perceptron_tagger_eng",
    "stopwords": "corpora/stopwords",
}
"""Data that the checkers read: name in NLTK's downloader -> path."""
# Its choice of a language is a draw otherwise.
langdetect.DetectorFactory.seed = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    name: str
    options: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class IfBenchReward(Reward):
    graded: Graded

    def score(self, group: SampleGroup) -> Sequence[Mapping[str, float]]:
        """`score`: 1 if all instructions are followed, else 0; `followed`: the share of them that are."""
        return [self._score(sample) for sample in group.samples]

    def _score(self, sample: Sample) -> Mapping[str, float]:
        instructions = instructions_of(sample.prompt, sample.metadata)
        text = self.graded.part(sample)
        asked = str(sample.metadata.get("prompt_text", sample.prompt.text))
        followed = [bool(text.strip()) and follows(instruction, asked, text, sample) for instruction in instructions]
        return {"score": float(all(followed)), "followed": sum(followed) / len(followed)}


def instructions_of(prompt: Prompt, metadata: Mapping[str, Any]) -> list[Instruction]:
    """The instructions in `instruction_id_list`, with their options in `kwargs`, where None means not set. RewardError if there
    are none, or if the two lists differ in length."""
    names, options = metadata.get("instruction_id_list"), metadata.get("kwargs")
    if not isinstance(names, list) or not names:
        raise RewardError(
            f"reward 'ifbench': {place(prompt)} has no metadata.instruction_id_list, the list of instructions to check."
        )
    given = [{}] * len(names) if options is None else options
    if not isinstance(given, list) or len(given) != len(names) or not all(isinstance(o, dict | None) for o in given):
        raise RewardError(
            f"reward 'ifbench': {place(prompt)} has {len(names)} instructions, and metadata.kwargs must be a list of as "
            f"many objects, not {options!r}."
        )
    return [
        Instruction(name=str(name), options={k: v for k, v in (of or {}).items() if v is not None})
        for name, of in zip(names, given, strict=True)
    ]


def follows(instruction: Instruction, prompt: str, response: str, sample: Sample) -> bool:
    """Whether the unchanged response follows the instruction."""
    kind = checker_of(instruction.name, sample)
    checker = kind(instruction.name)
    try:
        checker.build_description(**instruction.options)
        if "prompt" in (checker.get_instruction_args() or {}):
            checker.build_description(prompt=prompt)
        return bool(checker.check_following(response))
    except LookupError as error:
        if "Resource" in str(error):
            raise missing_data(instruction.name) from error
        # A checker raises it for a paragraph or a word that the response does not have.
        return False


def checker_of(name: str, sample: Sample) -> Any:
    if name in IFEVAL:
        return IFEVAL[name]
    if name in (registry := ifbench_checkers()):
        return registry[name]
    where = f"reward 'ifbench': {place(sample.prompt)}: metadata.instruction_id_list"
    raise RewardError(unknown_name(where, name, "instruction", sorted({*IFEVAL, *registry})))


@cache
def ifbench_checkers() -> Mapping[str, Any]:
    """The checkers of IFBench. Importing their module downloads missing data, so it is imported only if all data is there."""
    for path in NLTK_DATA.values():
        try:
            nltk.data.find(path)
        except LookupError as error:
            raise missing_data("the instructions of IFBench") from error
    from if_verifiable.ifbench.instructions_registry import INSTRUCTION_DICT

    registry: Mapping[str, Any] = INSTRUCTION_DICT
    return registry


def missing_data(what: str) -> RewardError:
    return RewardError(
        f"reward 'ifbench': {what} requires data of NLTK that is not on this machine. Run once: python -m nltk.downloader "
        f"{' '.join(NLTK_DATA)}, and set NLTK_DATA for a folder other than your home folder."
    )

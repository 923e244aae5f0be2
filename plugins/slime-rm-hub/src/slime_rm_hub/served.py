"""Reward served: a reward model or a judge that an engine such as SGLang serves over HTTP."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from slime_core.contracts.reward import Outcome, Reward, RewardFailure, RewardValue
from slime_core.errors import ConfigError
from slime_core.registry.boundary import shown
from slime_core.types.sample import Sample, SampleGroup
from slime_rm_hub.config import ServedConfig
from slime_rm_hub.service import Service

SGLANG, VLLM = "sglang", "vllm"


def served_reward(config: ServedConfig, service: Service, folder: str | None, *, program: str) -> Reward:
    """`folder`: of the served model's tokenizer. `program`: what serves (`rm_program`). ConfigError if the options of a judge
    are incomplete or invalid, or if the requests of this program are not known."""
    if program not in (SGLANG, VLLM):
        raise ConfigError(
            f"reward 'served': the requests of engine {program!r} are not known. Set rm_program to the program that it starts: "
            f"{SGLANG} or {VLLM}."
        )
    if config.kind == "judge" and program == VLLM:
        raise ConfigError(
            "reward 'served', kind = \"judge\": it asks a judge over SGLang's route /generate, which vLLM does not have. Pass "
            "--engines.reward.engine sglang."
        )
    tokenizer = None
    if folder is not None:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(folder)
    if config.kind == "classifier":
        # A model without a chat template was trained on plain text.
        joined = tokenizer is None or not tokenizer.chat_template
        return ClassifierReward(
            service=service.under("/classify"),
            render=Joined() if joined else Conversation(tokenizer),
            model=config.rm_model,
            of_vllm=program == VLLM,
        )
    if tokenizer is None or config.question is None:
        raise ConfigError(
            "reward 'served' with kind = \"judge\" requires rm_tokenizer, the folder of the judge's tokenizer, and "
            "question, a file with the question to ask."
        )
    ids = {word: tokenizer.encode(word, add_special_tokens=False) for word in (config.yes, config.no)}
    for word, tokens in ids.items():
        if len(tokens) != 1:
            raise ConfigError(
                f"reward 'served': {word!r} is {len(tokens)} tokens for the judge's tokenizer, and must be one. Set "
                "yes and no to other words."
            )
    try:
        template = Path(config.question).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"reward 'served': question: {config.question} cannot be read: {error}.") from error
    return JudgeReward(
        service=service.under("/generate"),
        render=Question(template, tokenizer),
        yes_id=ids[config.yes][0],
        no_id=ids[config.no][0],
    )


class Render(Protocol):
    """Renders a sample as the text for the served model."""

    def __call__(self, sample: Sample) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassifierReward(Reward):
    """POST the text to /classify; the score is what the score head returns, before any sigmoid: SGLang has it as the first
    number of `embedding`, vLLM as that of `probs`."""

    service: Service
    render: Render
    model: str
    of_vllm: bool

    def score(self, group: SampleGroup) -> Sequence[RewardValue]:
        answers = self.service.ask([self._body(self.render(sample)) for sample in group.samples])
        read = first_of_probs if self.of_vllm else first_of_embedding
        return [checked(self.service.name, answer, read) for answer in answers]

    def _body(self, text: str) -> dict[str, Any]:
        if not self.of_vllm:
            return {"model": self.model, "text": text}
        # vLLM refuses a name that is not its model's; without one it takes its only model.
        named = {} if self.model == ServedConfig.model_fields["rm_model"].default else {"model": self.model}
        return {**named, "input": text, "use_activation": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeReward(Reward):
    """POST the question to /generate for one token; the reward is P(yes) / (P(yes) + P(no)) of that token."""

    service: Service
    render: Render
    yes_id: int
    no_id: int

    def score(self, group: SampleGroup) -> Sequence[RewardValue]:
        ids = [self.yes_id, self.no_id]
        bodies = [
            {
                "text": self.render(sample),
                "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
                "return_logprob": True,
                "token_ids_logprob": ids,
            }
            for sample in group.samples
        ]

        def share(answer: Any) -> float:
            entries = answer["meta_info"]["output_token_ids_logprobs"][0]
            log_prob = {int(entry[1]): float(entry[0]) for entry in entries}
            return share_of(log_prob[self.yes_id], log_prob[self.no_id])

        return [checked(self.service.name, answer, share) for answer in self.service.ask(bodies)]


def first_of_embedding(answer: Any) -> float:
    one = answer[0] if isinstance(answer, list) and len(answer) == 1 else answer
    return float(one["embedding"][0])


def first_of_probs(answer: Any) -> float:
    (one,) = answer["data"]
    return float(one["probs"][0])


def share_of(yes: float, no: float) -> float:
    """exp(yes) / (exp(yes) + exp(no)), in nats.

    >>> share_of(-1000.0, -1000.0)
    0.5
    """
    return 0.5 * (1.0 + math.tanh(0.5 * (yes - no)))


def checked(url: str, answer: Any, read: Any) -> RewardValue:
    """The number that `read` returns for the service's answer, or a failure if it is no finite number."""
    if isinstance(answer, RewardFailure):
        return answer
    try:
        number: float = read(answer)
    except (KeyError, IndexError, TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        return RewardFailure(Outcome.WRONG, f"{url} returned {shown(answer)}, in which there is no score")
    return number


@dataclass(frozen=True, slots=True)
class Joined:
    """Prompt and response, joined."""

    def __call__(self, sample: Sample) -> str:
        return sample.prompt.text + sample.raw_response


def without_control_tokens(text: str, tokenizer: Any) -> str:
    """The policy's text without the served model's control tokens. A response that spelled one could end its turn, and write
    the next one itself."""
    template = str(tokenizer.chat_template)
    added = tokenizer.added_tokens_decoder.values()
    control = sorted({token.content for token in added if token.special or token.content in template})
    # Removing one may join the text around it into another one.
    while found := next((token for token in control if token in text), None):
        text = text.replace(found, "")
    return text


@dataclass(frozen=True, slots=True)
class Conversation:
    """The conversation, rendered with the served model's chat template. A prompt without messages is a user message."""

    tokenizer: Any

    def __call__(self, sample: Sample) -> str:
        asked = list(sample.prompt.messages or [{"role": "user", "content": sample.prompt.text}])
        response = without_control_tokens(sample.response, self.tokenizer)
        messages = [dict(m) for m in (*asked, {"role": "assistant", "content": response})]
        return str(self.tokenizer.apply_chat_template(messages, tokenize=False))


@dataclass(frozen=True, slots=True)
class Question:
    """A text with {prompt}, {response} and {label}, rendered with the judge's chat template if it has one."""

    template: str
    tokenizer: Any

    def __call__(self, sample: Sample) -> str:
        named: Mapping[str, object] = {
            "{prompt}": sample.prompt.text,
            "{response}": without_control_tokens(sample.response, self.tokenizer),
            "{label}": sample.prompt.label,
        }
        text = self.template
        # Not format(), since responses contain braces. The response is inserted last, so names in it are not replaced.
        for name in ("{prompt}", "{label}", "{response}"):
            text = text.replace(name, str(named[name]))
        if not self.tokenizer.chat_template:
            return text
        return str(
            self.tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
            )
        )

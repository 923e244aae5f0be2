"""Parameters of requests. Each is used, has no effect on a response, or is refused by name. Only those that the run
file names are ignored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from slime_agents.served.dialogue import BadCall
from slime_core.types.completion import SamplingParams

SAMPLED: Final = ("temperature", "top_p", "top_k", "repetition_penalty")
"""Names that SamplingParams and requests share. The run sets them."""
FREELY: Final = "The model writes freely: this would change the log-probs that are trained on"
FORMAT: Final = "Describe the format in a message, and check the response"
ADVICE: Final[Mapping[str, str]] = {
    "response_format": FORMAT,
    "output_format": FORMAT,
    "output_config": FORMAT,
    "text": FORMAT,
    "tool_choice": 'Without guided decoding, "auto" and "none" are supported',
    "parallel_tool_calls": f"{FREELY}. Use the first call of a response",
    "logit_bias": FREELY,
    "frequency_penalty": FREELY,
    "presence_penalty": FREELY,
    "seed": "Seeds follow from the run's rollout_seed",
    "top_logprobs": "Only the sampled token's log-prob is known: logprobs = true without top_logprobs",
    "reasoning_effort": "Set what the chat template knows with generate.chat_template_kwargs",
    "thinking": "Set what the chat template knows with generate.chat_template_kwargs",
    "chat_template_kwargs": "Set generate.chat_template_kwargs",
    "reasoning": "Set what the chat template knows with generate.chat_template_kwargs",
    "background": "A response is there when the call returns",
    "conversation": "Use previous_response_id, or send all items",
    "prompt": "Templates are stored at OpenAI; send the instructions and items themselves",
    "truncation": "Remove what is too long from the input",
    "context_management": "Remove what is too long from the input",
    "functions": "Use tools",
    "function_call": "Use tools and tool_choice",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """What an API's requests may have."""

    used: frozenset[str]
    no_effect: frozenset[str]
    """Labels and the like."""
    defaults: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """Parameters that are not supported, with the values that ask for what is done anyway."""

    def check(self, others: Mapping[str, Any], sampling: SamplingParams, ignored: Sequence[str]) -> None:
        """BadCall for the first of the parameters that are not in `used`, if it would not be respected. `sampling`: that of
        the episode; `ignored`: names that the run file accepts with any value."""
        for name, value in others.items():
            if value is None or name in self.no_effect or value in self.defaults.get(name, ()):
                continue
            if name not in SAMPLED:
                self.refuse(name, value, ignored)
            elif value != (of_run := getattr(sampling, name)):
                self.refuse(name, value, ignored, f"A call is sampled as the run samples, with {name} = {of_run}")

    def refuse(self, name: str, value: Any, ignored: Sequence[str], reason: str | None = None) -> None:
        """BadCall, unless the run file ignores the parameter."""
        if name not in ignored:
            raise refusal(name, value, reason or ADVICE.get(name, f"Supported are {', '.join(sorted(self.used))}"))


def refusal(name: str, value: Any, reason: str) -> BadCall:
    return BadCall(
        f"{name} = {value!r:.80}: not supported here. {reason}. Leave it out; if the agent cannot, accept in the run file that "
        f'it is ignored: generate.ignored_parameters = ["{name}"].',
        parameter=name,
    )

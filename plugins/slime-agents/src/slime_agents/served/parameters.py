"""Parameters of requests. Each is used, has no effect on a response, or is refused by name: none is ignored unless the run file
says so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from slime_agents.served.dialogue import BadCall
from slime_core.types.completion import SamplingParams

SAMPLED: Final = ("temperature", "top_p", "top_k", "repetition_penalty")
"""Names that SamplingParams and requests share. The run sets them."""
FREELY: Final = "The model writes freely: constrained sampling would change the log-probs that are trained on"
ADVICE: Final[Mapping[str, str]] = {
    "response_format": f"{FREELY}. Describe the format in a message, and check the response",
    "output_format": f"{FREELY}. Describe the format in a message, and check the response",
    "output_config": f"{FREELY}. Describe the format in a message, and check the response",
    "tool_choice": f'{FREELY}. "auto" and "none" are supported',
    "parallel_tool_calls": f"{FREELY}. Use the first call of a response",
    "logit_bias": FREELY,
    "frequency_penalty": FREELY,
    "presence_penalty": FREELY,
    "seed": "Seeds follow from the run's rollout_seed",
    "top_logprobs": "Only the sampled token's log-prob is known: logprobs = true without top_logprobs",
    "reasoning_effort": "Set what the chat template knows with generate.chat_template_kwargs",
    "thinking": "Set what the chat template knows with generate.chat_template_kwargs",
    "chat_template_kwargs": "Set generate.chat_template_kwargs",
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

    def check(self, given: Mapping[str, Any], sampling: SamplingParams, ignored: Sequence[str]) -> None:
        """BadCall with the name of the first parameter that would not be respected. `sampling`: that of the episode; `ignored`:
        names that the run file accepts with any value."""
        for name, value in given.items():
            if value is None or name in self.used or name in self.no_effect or name in ignored:
                continue
            if name in self.defaults and value in self.defaults[name]:
                continue
            if name in SAMPLED:
                if value == getattr(sampling, name):
                    continue
                why = f"A call is sampled as the run samples: {name} = {getattr(sampling, name)}"
            else:
                why = ADVICE.get(name, f"Supported are {', '.join(sorted(self.used))}")
            raise BadCall(
                f"{name} = {value!r:.80}: not supported here. {why}. Leave it out; if the agent cannot, accept that it is "
                f'ignored: generate.ignored_parameters = ["{name}"] in the run file.',
                parameter=name,
            )

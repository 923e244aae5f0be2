"""Options of slime-rm-hub, and how long a service may take by them."""

from __future__ import annotations

import math
from typing import Final, Literal

from pydantic import Field

from slime_core.contracts.driver import DriverConfig
from slime_core.contracts.paths import RunPath

LONGEST_PAUSE_S: Final = 30.0
"""Between two tries."""
TIME_OPTIONS: Final = ("request_timeout", "tries", "first_pause", "concurrency")
"""What `time_for` follows."""
SLACK_S: Final = 5.0


class GradedConfig(DriverConfig):
    """Options of the rewards that grade a text by rules."""

    think_end: str = Field("</think>", min_length=1)
    """Tag that closes the reasoning: what follows its last occurrence is graded; without one, all of the response."""
    boxed: bool = False
    """Grade only what stands in the last \\boxed{}; nothing if there is none."""


class AskingConfig(DriverConfig):
    """How a service is asked."""

    request_timeout: float = Field(60.0, gt=0)
    """Seconds for one request."""
    tries: int = Field(5, gt=0)
    """Requests for one sample until it has failed. Refused requests (4xx) are not tried again."""
    first_pause: float = Field(1.0, gt=0)
    """Seconds, give or take, before the second try; each pause is twice the one before, up to 30 s."""
    concurrency: int = Field(64, gt=0)
    """Requests in flight from one reward worker."""
    token_file: RunPath | None = None
    """File with the token that the service asks for (`Authorization: Bearer`)."""


class RemoteConfig(AskingConfig):
    """A service of your own."""

    rm_url: str = Field(pattern=r"^https?://")
    """Address of the service."""
    send_metadata: bool = False
    """Send the sample's metadata too."""


class ServedConfig(AskingConfig):
    """Who serves the model, and how it is asked."""

    rm_url: str | None = Field(None, pattern=r"^https?://")
    """Address of the server, such as http://127.0.0.1:30000; by default the run's own engines (engines.reward), where a
    request is tried twice: the run replaces an engine that fails."""
    kind: Literal["classifier", "judge"] = "classifier"
    """A reward model with a score head (/classify), or a language model that answers yes or no (/generate)."""
    rm_model: str = "default"
    """Name of the model, where the server asks for one."""
    rm_tokenizer: RunPath | None = None
    """Folder of the served model's tokenizer, for its chat template. A judge needs it, and a classifier without one reads
    prompt and response as they stand. With engines of the run, by default that of engines.reward.load."""
    question: RunPath | None = None
    """File with what a judge is asked, in which {prompt}, {response} and {label} are replaced."""
    yes: str = "Yes"
    """What a judge answers for a good response; one token of its own."""
    no: str = "No"
    """What it answers for a bad one; one token of its own."""


class RandomConfig(DriverConfig):
    """Which coin."""

    seed: int = 0
    """Another seed, other draws."""


def twice(config: ServedConfig) -> ServedConfig:
    """Asking the run's own engines, which are replaced when they fail."""
    return config.model_copy(update={"tries": min(config.tries, 2)})


def time_for(config: AskingConfig, num_samples: int) -> float:
    """Seconds for a group: every try of a sample and the pauses between them, for as many samples as wait behind each
    other, and SLACK_S, so that samples fail one by one before their group does."""
    pauses = sum(min(config.first_pause * (2.0**number + 1.0), LONGEST_PAUSE_S) for number in range(config.tries - 1))
    turns = math.ceil(num_samples / config.concurrency)
    return turns * (config.tries * config.request_timeout + pauses) + SLACK_S

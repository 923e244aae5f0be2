"""Options of slime-rm-hub, and the time limit that follows from them."""

from __future__ import annotations

import math
from typing import Final, Literal

from pydantic import Field

from slime_core.contracts.driver import DriverConfig
from slime_core.contracts.paths import RunPath

LONGEST_PAUSE_S: Final = 30.0
"""Longest pause between two tries."""
TIME_OPTIONS: Final = ("request_timeout", "tries", "first_pause", "concurrency")
"""Options that `time_for` depends on."""
SLACK_S: Final = 5.0


class GradedConfig(DriverConfig):
    """Options of the rewards that grade a text by rules."""

    think_end: str = Field("</think>", min_length=1)
    """Tag that closes the reasoning: what follows its last occurrence is graded; without one, all of the response."""
    boxed: bool = False
    """Grade only what is in the last \\boxed{}; nothing if there is none."""


class AskingConfig(DriverConfig):
    """Options of requests to a service."""

    request_timeout: float = Field(60.0, gt=0)
    """Seconds for one request."""
    tries: int = Field(5, gt=0)
    """Requests for one sample until it has failed. Refused requests (4xx) are not tried again."""
    first_pause: float = Field(1.0, gt=0)
    """Seconds before the second try, with random jitter; each pause is twice as long as the last, up to 30 s."""
    concurrency: int = Field(64, gt=0)
    """Requests in flight from one reward worker."""
    token_file: RunPath | None = None
    """File with the token that the service requires (`Authorization: Bearer`)."""


class RemoteConfig(AskingConfig):
    """A service of your own."""

    rm_url: str = Field(pattern=r"^https?://")
    """Address of the service."""
    send_metadata: bool = False
    """Send the sample's metadata too."""


class ServedConfig(AskingConfig):
    """Options of the served model."""

    rm_url: str | None = Field(None, pattern=r"^https?://")
    """Address of the server, such as http://127.0.0.1:30000; by default the run's own engines (engines.reward), with at
    most two tries of a request: the run replaces an engine that fails."""
    kind: Literal["classifier", "judge"] = "classifier"
    """A reward model with a score head (/classify), or a language model that answers yes or no (/generate)."""
    rm_program: Literal["sglang", "vllm"] | None = None
    """The program that serves, whose requests are sent; by default the engine of engines.reward, and sglang with rm_url. vLLM
    serves classifiers."""
    rm_model: str = "default"
    """Name of the model, if the server requires one."""
    rm_tokenizer: RunPath | None = None
    """Folder of the served model's tokenizer, for its chat template. A judge requires it. A classifier without
    it gets prompt and response joined. With engines of the run, by default that of engines.reward.load."""
    question: RunPath | None = None
    """File with the question for a judge, in which {prompt}, {response} and {label} are replaced."""
    yes: str = "Yes"
    """Answer of a judge for a good response; must be one token."""
    no: str = "No"
    """Answer of a judge for a bad response; must be one token."""


class RandomConfig(DriverConfig):
    """Options of the reward random."""

    seed: int = 0
    """Seed of the random rewards."""


def twice(config: ServedConfig) -> ServedConfig:
    """The options with at most two tries, for the run's own engines, which are replaced when they fail."""
    return config.model_copy(update={"tries": min(config.tries, 2)})


def time_for(config: AskingConfig, num_samples: int) -> float:
    """Time limit of a group in seconds: all tries and pauses of a sample, times the rounds of `concurrency` samples, plus
    SLACK_S, so that samples fail one by one before their group does."""
    pauses = sum(min(config.first_pause * (2.0**number + 1.0), LONGEST_PAUSE_S) for number in range(config.tries - 1))
    turns = math.ceil(num_samples / config.concurrency)
    return turns * (config.tries * config.request_timeout + pauses) + SLACK_S

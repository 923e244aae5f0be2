"""What the entry points name: options of the rewards."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Final, Literal

from pydantic import Field

from slime_core.contracts.driver import DriverConfig
from slime_core.contracts.paths import RunPath
from slime_core.contracts.reward import Reward, RewardDriver, ServedModel
from slime_core.errors import ConfigError, PluginError

if TYPE_CHECKING:
    from slime_core.contracts.example import Example
    from slime_rm_hub.response import Graded
    from slime_rm_hub.service import Place, Service


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


class F1(RewardDriver):
    """Token F1 of answer and label, in [0, 1]; yes, no and noanswer must match exactly."""

    Config = GradedConfig

    @classmethod
    def build(cls, config: GradedConfig) -> Reward:
        from slime_rm_hub.f1 import F1Reward

        return F1Reward(graded=graded(config))

    @classmethod
    def examples(cls, folder: Path) -> Sequence[Example]:
        from slime_rm_hub import examples

        return examples.F1


class Gpqa(RewardDriver):
    """Multiple choice: 1 if the response names the right letter, else 0."""

    Config = GradedConfig

    @classmethod
    def build(cls, config: GradedConfig) -> Reward:
        from slime_rm_hub.gpqa import GpqaReward

        return GpqaReward(graded=graded(config))

    @classmethod
    def examples(cls, folder: Path) -> Sequence[Example]:
        from slime_rm_hub import examples

        return examples.GPQA


class IfBench(RewardDriver):
    """`score` 1 if the response follows every instruction of metadata.instruction_id_list, else 0; `followed`: the share."""

    Config = GradedConfig
    reward_key: ClassVar[str | None] = "score"

    @classmethod
    def build(cls, config: GradedConfig) -> Reward:
        try:
            from slime_rm_hub.ifbench import IfBenchReward
        except ModuleNotFoundError as error:
            if error.name is None or error.name.startswith("slime"):
                raise
            raise PluginError(
                f"reward 'ifbench' needs {error.name}, which is not installed. Say: pip install 'slime-rm-hub[ifbench]'"
            ) from error
        return IfBenchReward(graded=graded(config))

    @classmethod
    def examples(cls, folder: Path) -> Sequence[Example]:
        from slime_rm_hub import examples

        return examples.IFBENCH


class RemoteConfig(AskingConfig):
    """A service of your own."""

    rm_url: str = Field(pattern=r"^https?://")
    """Address of the service."""
    send_metadata: bool = False
    """Send the sample's metadata too."""


class Remote(RewardDriver):
    """POST {prompt, response, label} to rm_url, which answers a JSON number, or an object of which reward_key counts."""

    Config = RemoteConfig
    timeout_follows = TIME_OPTIONS

    @classmethod
    def timeout_s(cls, config: RemoteConfig, num_samples: int) -> float:
        return time_for(config, num_samples)

    @classmethod
    def build(cls, config: RemoteConfig) -> Reward:
        from slime_rm_hub.remote import RemoteReward
        from slime_rm_hub.service import Place

        place = Place(url=config.rm_url, token=token_of(config))
        return RemoteReward(service=service(config, (place,)), send_metadata=config.send_metadata)

    @classmethod
    def examples(cls, folder: Path) -> Sequence[Example]:
        from slime_rm_hub import examples

        return examples.remote()


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


class Served(RewardDriver):
    """The score of a reward model, or a judge's P(yes) / (P(yes) + P(no)), from an engine's HTTP server."""

    Config = ServedConfig
    timeout_follows = TIME_OPTIONS

    @classmethod
    def timeout_s(cls, config: ServedConfig, num_samples: int) -> float:
        return time_for(config if config.rm_url is not None else twice(config), num_samples)

    @classmethod
    def asks_engines(cls, config: ServedConfig) -> bool:
        return config.rm_url is None

    @classmethod
    def build(cls, config: ServedConfig) -> Reward:
        from slime_rm_hub.served import served_reward
        from slime_rm_hub.service import Place

        assert config.rm_url is not None, "without it the kernel calls build_asking"
        place = Place(url=config.rm_url.rstrip("/"), token=token_of(config))
        return served_reward(config, service(config, (place,)), config.rm_tokenizer)

    @classmethod
    def build_asking(cls, config: ServedConfig, servers: Sequence[ServedModel]) -> Reward:
        from slime_rm_hub.served import served_reward
        from slime_rm_hub.service import Place

        if config.token_file is not None:
            raise ConfigError("reward 'served': token_file is for rm_url; engines of the run have tokens of their own.")
        places = tuple(Place(url=server.url, token=server.token) for server in servers)
        return served_reward(config, service(twice(config), places), config.rm_tokenizer or servers[0].model_path)

    @classmethod
    def examples(cls, folder: Path) -> Sequence[Example]:
        from slime_rm_hub import examples

        return examples.served()


class RandomConfig(DriverConfig):
    """Which coin."""

    seed: int = 0
    """Another seed, other draws."""


class Random(RewardDriver):
    """0 or 1 by seed and sample index: what a run learns from it is nothing."""

    Config = RandomConfig

    @classmethod
    def build(cls, config: RandomConfig) -> Reward:
        from slime_rm_hub.random_draw import RandomReward

        return RandomReward(seed=config.seed)


def graded(config: GradedConfig) -> Graded:
    from slime_rm_hub.response import Graded

    return Graded(think_end=config.think_end, boxed=config.boxed)


def token_of(config: AskingConfig) -> str | None:
    """What stands in `token_file`. ConfigError if it cannot be read."""
    if config.token_file is None:
        return None
    try:
        return Path(config.token_file).read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ConfigError(f"reward.token_file = {str(config.token_file)!r}: cannot be read: {error}.") from error


def service(config: AskingConfig, places: tuple[Place, ...]) -> Service:
    from slime_rm_hub.service import Service

    return Service(
        places=places,
        timeout_s=config.request_timeout,
        tries=config.tries,
        concurrency=config.concurrency,
        first_pause_s=config.first_pause,
    )


def twice(config: ServedConfig) -> ServedConfig:
    """Asking the run's own engines, which are replaced when they fail."""
    return config.model_copy(update={"tries": min(config.tries, 2)})


def time_for(config: AskingConfig, num_samples: int) -> float:
    """Seconds for a group: every try of a sample and the pauses between them, for as many samples as wait behind each
    other, and SLACK_S, so that samples fail one by one before their group does."""
    pauses = sum(min(config.first_pause * (2.0**number + 1.0), 30.0) for number in range(config.tries - 1))
    turns = math.ceil(num_samples / config.concurrency)
    return turns * (config.tries * config.request_timeout + pauses) + SLACK_S

"""Drivers of slime-rm-hub. The rewards are imported when they are built."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from slime_core.contracts.reward import Reward, RewardDriver, ServedModel
from slime_core.errors import ConfigError, PluginError
from slime_rm_hub.config import TIME_OPTIONS, GradedConfig, RandomConfig, RemoteConfig, ServedConfig, time_for, twice

if TYPE_CHECKING:
    from slime_core.contracts.example import Example


class F1(RewardDriver):
    """Token F1 of answer and label, in [0, 1]; yes, no and noanswer must match exactly."""

    Config = GradedConfig

    @classmethod
    def build(cls, config: GradedConfig) -> Reward:
        from slime_rm_hub.f1 import F1Reward
        from slime_rm_hub.response import Graded

        return F1Reward(graded=Graded.from_config(config))

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
        from slime_rm_hub.response import Graded

        return GpqaReward(graded=Graded.from_config(config))

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
                f"reward 'ifbench' requires {error.name}, which is not installed. Run: pip install 'slime-rm-hub[ifbench]'"
            ) from error
        from slime_rm_hub.response import Graded

        return IfBenchReward(graded=Graded.from_config(config))

    @classmethod
    def examples(cls, folder: Path) -> Sequence[Example]:
        from slime_rm_hub import examples

        return examples.IFBENCH


class Remote(RewardDriver):
    """POST {prompt, response, label} to rm_url, which returns a JSON number, or an object with the number reward_key."""

    Config = RemoteConfig
    timeout_follows = TIME_OPTIONS

    @classmethod
    def timeout_s(cls, config: RemoteConfig, num_samples: int) -> float:
        return time_for(config, num_samples)

    @classmethod
    def build(cls, config: RemoteConfig) -> Reward:
        from slime_rm_hub.remote import RemoteReward
        from slime_rm_hub.service import Place, Service, read_token

        place = Place(url=config.rm_url, token=read_token(config))
        return RemoteReward(service=Service.from_config(config, (place,)), send_metadata=config.send_metadata)

    @classmethod
    def examples(cls, folder: Path) -> Sequence[Example]:
        from slime_rm_hub import examples

        return examples.remote()


class Served(RewardDriver):
    """The score of a reward model, or a judge's P(yes) / (P(yes) + P(no)), from an engine's HTTP server."""

    Config = ServedConfig
    timeout_follows = TIME_OPTIONS

    @classmethod
    def timeout_s(cls, config: ServedConfig, num_samples: int) -> float:
        return time_for(config if config.rm_url is not None else twice(config), num_samples)

    @classmethod
    def needs_reward_model(cls, config: ServedConfig) -> bool:
        return config.rm_url is None

    @classmethod
    def build(cls, config: ServedConfig) -> Reward:
        from slime_rm_hub.served import served_reward
        from slime_rm_hub.service import Place, Service, read_token

        assert config.rm_url is not None, "without it the kernel calls build_with_servers"
        place = Place(url=config.rm_url.rstrip("/"), token=read_token(config))
        return served_reward(
            config, Service.from_config(config, (place,)), config.rm_tokenizer, program=config.rm_program or "sglang"
        )

    @classmethod
    def build_with_servers(cls, config: ServedConfig, servers: Sequence[ServedModel]) -> Reward:
        from slime_rm_hub.served import served_reward
        from slime_rm_hub.service import Place, Service

        if config.token_file is not None:
            raise ConfigError(
                "reward 'served': token_file requires rm_url; the run's own engines have their own tokens."
            )
        places = tuple(Place(url=server.url, token=server.token) for server in servers)
        return served_reward(
            config,
            Service.from_config(twice(config), places),
            config.rm_tokenizer or servers[0].model_path,
            program=config.rm_program or servers[0].engine,
        )

    @classmethod
    def examples(cls, folder: Path) -> Sequence[Example]:
        from slime_rm_hub import examples

        return examples.served()


class Random(RewardDriver):
    """0 or 1 by seed and sample index: what a run learns from it is nothing."""

    Config = RandomConfig

    @classmethod
    def build(cls, config: RandomConfig) -> Reward:
        from slime_rm_hub.random_draw import RandomReward

        return RandomReward(seed=config.seed)

"""Drivers of slime-compat: old functions by their dotted paths, at the extension points that call them; old dumps; reward
functions of verl and of TRL."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Final

from slime_compat.config import (
    CompatCollectorConfig,
    CompatDumpConfig,
    CompatGeneratorConfig,
    CompatReducerConfig,
    CompatRewardConfig,
    CompatSourceConfig,
    CompatTrainerHooksConfig,
    OldFunctionConfig,
)
from slime_core.contracts.advantage import AdvantageDriver, AdvantageEstimator
from slime_core.contracts.collector import Collector, CollectorDriver, RolloutOptions
from slime_core.contracts.correction import CorrectionDriver, OffPolicyCorrection
from slime_core.contracts.driver import Driver
from slime_core.contracts.example import (
    AdvantageExample,
    CollectorExample,
    CorrectionExample,
    Example,
    ExampleSample,
    FilterExample,
    LossExample,
    RewardExample,
    SourceExample,
)
from slime_core.contracts.filter import BufferFilter, BufferFilterDriver, FilterDriver, GroupFilter
from slime_core.contracts.generator import Generator, GeneratorDriver
from slime_core.contracts.loss import LossDriver, PolicyLoss
from slime_core.contracts.needs import Need
from slime_core.contracts.reward import Reward, RewardDriver
from slime_core.contracts.source import SourceDriver, SourceFactory
from slime_training.hooks import PostWriteHook, TrainerHooks

WRITTEN: Final = "slime_compat.written_before"
"""Module of the examples' functions."""


class CompatReward(RewardDriver):
    """A reward function that was written for THUDM's slime."""

    Config = CompatRewardConfig

    @classmethod
    def build(cls, config: CompatRewardConfig) -> Reward:
        from slime_compat.reward import OldReward

        return OldReward(config)

    @classmethod
    def examples(cls, folder: Path) -> Sequence[Example]:
        forms: dict[str, bool] = {"reward": False, "rewards_of_group": True}
        return [
            RewardExample(
                options={"path": f"{WRITTEN}.{name}", "group": group},
                prompt="2+2=",
                label="4",
                responses=("4", "5", ""),
                rewards=(1.0, 0.0, 0.0),
            )
            for name, group in forms.items()
        ]


class CompatGenerator(GeneratorDriver):
    """A generate function that was written for THUDM's slime; its requests to the router go to the run's engines."""

    Config = CompatGeneratorConfig

    @classmethod
    def build(cls, config: CompatGeneratorConfig) -> Generator:
        from slime_compat.generator import OldGenerator

        return OldGenerator(config)

    @classmethod
    def examples(cls, folder: Path) -> Sequence[Example]:
        return [Example(options={"path": f"{WRITTEN}.generate"})]


class CompatFilter(FilterDriver):
    """A dynamic sampling filter that was written for THUDM's slime."""

    Config = OldFunctionConfig

    @classmethod
    def build(cls, config: OldFunctionConfig) -> GroupFilter:
        from slime_compat.group_filter import OldFilter

        return OldFilter(config)

    @classmethod
    def examples(cls, folder: Path) -> Sequence[Example]:
        return [Example(options={"path": f"{WRITTEN}.keep_unequal"})]


class CompatCollector(CollectorDriver):
    """Functions of a whole step that were written for THUDM's slime: rollout function, sample filter, function of all samples,
    reward post-processing, conversion to train data."""

    Config = CompatCollectorConfig

    @classmethod
    def build(cls, config: CompatCollectorConfig) -> Collector[Any]:
        from slime_compat.collector import OldCollector

        return OldCollector(config)

    @classmethod
    def problems(cls, config: CompatCollectorConfig, rollout: RolloutOptions) -> list[str]:
        if config.rollout_function_path is None or not rollout.filters:
            return []
        return [
            f"rollout.filters = {[of.name for of in rollout.filters]}: a rollout function chooses its groups itself. Leave "
            "them out, or leave rollout.collector.rollout_function_path out."
        ]

    @classmethod
    def examples(cls, folder: Path) -> Sequence[Example]:
        return [
            Example(options={"rollout_sample_filter_path": f"{WRITTEN}.remove_truncated"}),
            Example(options={"reward_post_process_path": f"{WRITTEN}.center_rewards"}),
        ]


class CompatSource(SourceDriver):
    """A data source that was written for THUDM's slime."""

    Config = CompatSourceConfig

    @classmethod
    def build(cls, config: CompatSourceConfig) -> SourceFactory:
        from slime_compat.source import OldSource

        return functools.partial(OldSource, config)

    @classmethod
    def examples(cls, folder: Path) -> Sequence[Example]:
        path = f"{WRITTEN}.Countdown"
        return [SourceExample(options={"path": path}, other_options={"path": path, "args": {"other": True}})]


class CompatBufferFilter(BufferFilterDriver):
    """A buffer filter that was written for THUDM's slime."""

    Config = OldFunctionConfig

    @classmethod
    def build(cls, config: OldFunctionConfig) -> BufferFilter:
        from slime_compat.buffer_filter import OldBufferFilter

        return OldBufferFilter(config)

    @classmethod
    def examples(cls, folder: Path) -> Sequence[Example]:
        return [FilterExample(options={"path": f"{WRITTEN}.newest_first"})]


class CompatAdvantage(AdvantageDriver):
    """A function of advantages that was written for THUDM's slime."""

    Config = OldFunctionConfig
    needs: ClassVar[frozenset[Need]] = frozenset({Need.OLD_LOGPROBS})
    accepts_kl_penalty = True

    @classmethod
    def build(cls, config: OldFunctionConfig) -> AdvantageEstimator:
        from slime_compat.advantage import OldAdvantage

        return OldAdvantage(config)

    @classmethod
    def examples(cls, folder: Path) -> Sequence[Example]:
        return cls.weighted_by("weighted_advantages")

    @classmethod
    def weighted_by(cls, function: str, column: str | None = None) -> list[AdvantageExample]:
        """Credits 0.5, -0.5 and 0; each column of the weight, log-probs and another one, is ln 0.5."""
        half = -0.693147181
        weight = 0.5 if column is None else 0.25
        credits = ((1.0, 2), (0.0, 1), (0.5, 3))
        samples = [
            ExampleSample(mask=[1] * length, reward=reward, old_log_probs=[half] * length) for reward, length in credits
        ]
        if column is not None:
            of_column: list[dict[str, Any]] = [{column: [half] * length} for _, length in credits]
            samples = [replace(sample, **more) for sample, more in zip(samples, of_column, strict=True)]
        options = {"path": f"{WRITTEN}.{function}", "args": {"kl_coef": 1.0}}
        advantages = [[0.5 * weight] * 2, [-0.5 * weight], [0.0] * 3]
        return [AdvantageExample(options=options, samples=samples, advantages=advantages)]


class CompatRefAdvantage(CompatAdvantage):
    """The same, for a function that reads ref_log_probs."""

    needs: ClassVar[frozenset[Need]] = CompatAdvantage.needs | {Need.REF_LOGPROBS}

    @classmethod
    def examples(cls, folder: Path) -> Sequence[Example]:
        return cls.weighted_by("advantages_by_reference", "ref_log_probs")


class CompatValuesAdvantage(CompatAdvantage):
    """The same, for a function that reads the values of a critic."""

    needs: ClassVar[frozenset[Need]] = CompatAdvantage.needs | {Need.VALUES}

    @classmethod
    def examples(cls, folder: Path) -> Sequence[Example]:
        return cls.weighted_by("advantages_by_value", "values")


class CompatLoss(LossDriver):
    """A loss function that was written for THUDM's slime, and reads log-probs and entropies."""

    Config = OldFunctionConfig
    needs: ClassVar[frozenset[Need]] = frozenset({Need.OLD_LOGPROBS, Need.ENTROPY, Need.ROLLOUT_LOGPROBS})

    @classmethod
    def build(cls, config: OldFunctionConfig) -> PolicyLoss:
        from slime_compat.old_loss import OldLoss

        return OldLoss(config)

    @classmethod
    def examples(cls, folder: Path) -> Sequence[Example]:
        # -ratio A (1 + H / 2) + (old - rollout) / 4: ratio 2 with advantage 3, and ratio 1 with advantage -1.
        return cls.example("loss_of_ratios", values=(-11.9, 0.0, 1.5), gradient=(-12.0, 0.0, 1.5))

    @classmethod
    def example(cls, function: str, values: Sequence[float], gradient: Sequence[float]) -> list[Example]:
        sample = ExampleSample(
            mask=(1, 0, 1),
            log_probs=(-0.306852819, -9.0, -1.0),
            old_log_probs=(-1.0, 0.0, -1.0),
            ref_log_probs=(-1.306852819, 0.0, -1.0),
            rollout_log_probs=(-1.4, 0.0, -1.0),
            entropy=(2.0, 3.0, 1.0),
            advantages=(3.0, 5.0, -1.0),
        )
        options = {"path": f"{WRITTEN}.{function}"}
        return [LossExample(options=options, samples=[sample], values=[values], gradient=[gradient])]


class CompatRefLoss(CompatLoss):
    """The same, for a function that reads ref_log_probs."""

    needs: ClassVar[frozenset[Need]] = CompatLoss.needs | {Need.REF_LOGPROBS}

    @classmethod
    def examples(cls, folder: Path) -> Sequence[Example]:
        # Beside it A (l - ref) / 2.
        return cls.example("loss_with_reference", values=(-10.4, 0.0, 1.5), gradient=(-10.5, 0.0, 1.0))


class CompatCorrection(CorrectionDriver):
    """A TIS function (off-policy weights and rejections) that was written for THUDM's slime."""

    Config = OldFunctionConfig

    @classmethod
    def build(cls, config: OldFunctionConfig) -> OffPolicyCorrection:
        from slime_compat.correction import OldCorrection

        return OldCorrection(config)

    @classmethod
    def examples(cls, folder: Path) -> Sequence[Example]:
        # Ratios e^0.5, 1, e^1.5 (truncated), and e^3 (rejected).
        sample = ExampleSample(
            mask=(1, 1, 1, 1), old_log_probs=(-1.0, -1.0, -1.0, -1.0), rollout_log_probs=(-1.5, -1.0, -2.5, -4.0)
        )
        options = {"path": f"{WRITTEN}.truncated_weights", "args": {"tis_clip": 2.0, "tis_veto": 10.0}}
        return [CorrectionExample(options=options, samples=[sample], weights=[(1.648721271, 1.0, 2.0, 0.0)])]


class CompatReducer(CorrectionDriver):
    """A reducer of the policy loss that was written for THUDM's slime, as a weight of each token.

    No correction of a mismatch, but what weighs the policy loss alone, as upstream."""

    Config = CompatReducerConfig
    needs: ClassVar[frozenset[Need]] = frozenset()

    @classmethod
    def build(cls, config: CompatReducerConfig) -> OffPolicyCorrection:
        from slime_compat.correction import OldReducer

        return OldReducer(config)

    @classmethod
    def examples(cls, folder: Path) -> Sequence[Example]:
        # Its sum is that of token_mean, so it changes nothing.
        samples = [ExampleSample(mask=(1, 1, 0)), ExampleSample(mask=(1,))]
        options = {"path": f"{WRITTEN}.sum_of_tokens", "aggregation": "token_mean"}
        return [CorrectionExample(options=options, samples=samples, weights=[(1.0, 1.0, 0.0), (1.0,)])]


class CompatTrainerHooks(Driver[TrainerHooks]):
    """Hooks of Megatron's trainers that were written for THUDM's slime."""

    Config = CompatTrainerHooksConfig

    @classmethod
    def build(cls, config: CompatTrainerHooksConfig) -> TrainerHooks:
        from slime_compat.trainer_hooks import OldTrainerHooks

        return OldTrainerHooks(config)


class CompatPostWriteHook(Driver[PostWriteHook]):
    """A function that was written for THUDM's slime, called between writing new weights to a folder and loading them."""

    Config = OldFunctionConfig

    @classmethod
    def build(cls, config: OldFunctionConfig) -> PostWriteHook:
        from slime_compat.trainer_hooks import OldPostWriteHook

        return OldPostWriteHook(config)


class CompatDump(CollectorDriver):
    """Steps from dumps of THUDM's slime (`--save-debug-rollout-data`); no engine is started."""

    Config = CompatDumpConfig

    @classmethod
    def build(cls, config: CompatDumpConfig) -> Collector[Any]:
        from slime_compat.rollout_dump import DumpedGroups

        return DumpedGroups(config)

    @classmethod
    def needs_engine(cls, config: Any) -> bool:
        return False

    @classmethod
    def notices(cls, config: CompatDumpConfig) -> Sequence[str]:
        if not config.is_one_file:
            return ()
        return (
            f'rollout.collector.path = "{config.path}": it has no {{rollout_id}}, so every step trains on this file.',
        )

    @classmethod
    def examples(cls, folder: Path) -> Sequence[Example]:
        from slime_compat.written_dump import write_example

        shape = CollectorExample(options={"path": str(folder / "{rollout_id}.pt")})
        write_example(folder, shape.num_steps, shape.rollout_batch_size, shape.n_samples_per_prompt)
        return [shape]

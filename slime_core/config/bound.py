"""BoundRun: a run whose every name has a driver and every option a Config. Frozen; workers rebuild parts from specs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slime_core import groups
from slime_core.config.algo import AlgoConfig
from slime_core.config.part import BoundPlugin
from slime_core.config.roles import BoundRole, count_ranks
from slime_core.config.run import RunConfig
from slime_core.contracts.algorithm import Recipe
from slime_core.contracts.needs import Need
from slime_core.contracts.setup import RoutingReplay
from slime_core.registry import Entry, Registry
from slime_core.registry.install_hints import known_names


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundAlgo:
    """A recipe with its parts."""

    name: str
    entry: Entry
    recipe: Recipe
    keys: AlgoConfig
    advantage: BoundPlugin | None
    advantage_terms: tuple[BoundPlugin, ...] = ()
    loss: BoundPlugin
    kl_loss: BoundPlugin | None
    kl_reward: BoundPlugin | None
    critic_loss: BoundPlugin | None
    shaping: tuple[BoundPlugin, ...]
    corrections: tuple[BoundPlugin, ...]

    @property
    def parts(self) -> tuple[BoundPlugin, ...]:
        """All of them, in a fixed order."""
        parts = (
            self.advantage, *self.advantage_terms, self.loss, self.kl_loss, self.kl_reward, self.critic_loss,
            *self.shaping, *self.corrections,
        )  # fmt: skip
        return tuple(part for part in parts if part is not None)

    @property
    def estimators(self) -> tuple[BoundPlugin, ...]:
        """The advantage estimators in order; empty if the loss uses none."""
        if self.advantage is None or not self.loss.driver.uses_advantages:
            return ()
        return (self.advantage, *self.advantage_terms)

    @property
    def uses_rewards(self) -> bool:
        """True if an estimator uses rewards."""
        return any(part.driver.uses_rewards for part in self.estimators)

    @property
    def loss_needs(self) -> frozenset[Need]:
        """The columns that the loss reads, with its KL, entropy and correction terms."""
        needs = frozenset(self.loss.driver.needs)
        if self.keys.with_kl_loss:
            needs |= {Need.REF_LOGPROBS}
            if self.keys.use_unbiased_kl:
                needs |= {Need.OLD_LOGPROBS}
        for part in self.corrections:
            needs |= part.driver.needs
        return needs

    @property
    def credit_needs(self) -> frozenset[Need]:
        """The columns that advantages and the KL penalty in the reward read."""
        needs = frozenset(need for part in self.estimators for need in part.driver.needs)
        if self.keys.kl_coef:
            needs |= {Need.OLD_LOGPROBS, Need.REF_LOGPROBS}
        return needs

    @property
    def critic_needs(self) -> frozenset[Need]:
        """The columns that the critic's loss reads."""
        return frozenset() if self.critic_loss is None else frozenset(self.critic_loss.driver.needs)

    @property
    def needs(self) -> frozenset[Need]:
        return self.loss_needs | self.credit_needs | self.critic_needs

    def old_is_current(self, steps_per_rollout: int) -> bool:
        """True if the old log-probs must equal the current ones, so that no forward computes them."""
        return (
            Need.OLD_LOGPROBS in self.loss_needs
            and Need.OLD_LOGPROBS not in self.credit_needs
            and steps_per_rollout == 1
            and not self.keys.use_rollout_logprobs
            and not self.keys.get_mismatch_metrics
            and not self.loss.driver.sequence_level
            and not self.recipe.roles
            and all(part.driver.in_loss for part in self.corrections)
        )

    def old_from_rollout(self, steps_per_rollout: int) -> bool:
        """True if the old log-probs are the engine's, so that no forward computes them."""
        same = self.keys.true_on_policy_mode and not self.old_is_current(steps_per_rollout)
        return self.keys.use_rollout_logprobs or same


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundReward:
    """One of the run's rewards."""

    part: BoundPlugin
    weight: float = 1.0
    label: str
    reward_key: str | None
    """Which of its named numbers counts, if it has several."""

    @classmethod
    def alone(cls, part: BoundPlugin, reward_key: str | None) -> BoundReward:
        """A run's only reward: `reward_key`, or by default the reward's own choice."""
        return cls(part=part, label=part.name, reward_key=reward_key or part.driver.reward_key)


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundEvalSet:
    """One evaluation set with nothing left to default."""

    name: str
    path: str
    num_samples: int
    temperature: float
    top_p: float
    top_k: int
    max_response_len: int
    max_prompt_len: int | None
    min_new_tokens: int
    repetition_penalty: float
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    rewards: tuple[BoundReward, ...]
    generate: BoundPlugin | None
    input_key: str
    label_key: str | None
    tool_key: str
    metadata_key: str
    apply_chat_template: bool
    pass_threshold: float
    metadata_overrides: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundEngines:
    """Engines of a model that is not trained."""

    name: str
    """Name of the row in the engines table."""
    engine: BoundPlugin
    model_path: Path
    num_engines: int
    num_devices: int
    """Devices of one engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundRun:
    """The whole run, ready to start."""

    config: RunConfig
    registry: Registry
    base: Path
    """Folder of the run file."""
    algo: BoundAlgo
    backend: BoundPlugin
    optimizers: Mapping[str, BoundPlugin]
    """Optimizers by role: the policy's, and those of roles that name one of their own."""
    engine: BoundPlugin
    transport: BoundPlugin | None
    source: BoundPlugin
    renderer: BoundPlugin
    rewards: tuple[BoundReward, ...]
    """Rewards of the run, whose weighted sum is trained on; empty: no reward."""
    generate: BoundPlugin
    collector: BoundPlugin
    buffer_filter: BoundPlugin
    launcher: BoundPlugin
    filters: tuple[BoundPlugin, ...] = ()
    trackers: tuple[BoundPlugin, ...] = ()
    middlewares: tuple[BoundPlugin, ...] = ()
    media: tuple[BoundPlugin, ...] = ()
    """The modalities of `data.multimodal_keys`."""
    evals: tuple[BoundEvalSet, ...] = field(default=())
    teacher: BoundEngines | None = None
    reward_model: BoundEngines | None = None
    role_backends: Mapping[str, BoundPlugin] = field(default_factory=dict)
    """Backends of roles that name one of their own."""
    roles: tuple[BoundRole, ...] = ()
    """The models that are trained; the first one is the policy."""

    @property
    def engine_folder(self) -> Path:
        """The folder that the policy's engines start from."""
        return Path(self.config.model.rollout_load or self.config.model.hf_checkpoint)

    @property
    def updates_weights(self) -> bool:
        """True if engines get the trained weights."""
        has_engine = self.generates or bool(self.evals)
        return has_engine and self.transport is not None and not self.config.rollout.debug_rollout_only

    @property
    def served(self) -> tuple[BoundEngines, ...]:
        """Models that are served and not trained, in the order in which their engines start."""
        return tuple(row for row in (self.teacher, self.reward_model) if row is not None)

    @property
    def parts(self) -> tuple[BoundPlugin, ...]:
        """Every plugin that the run uses, in a fixed order."""
        evals = [part for e in self.evals for part in (*(reward.part for reward in e.rewards), e.generate)]
        parts = (
            self.backend, *self.role_backends.values(), self.engine, *(row.engine for row in self.served), self.transport,
            *(reward.part for reward in self.rewards), self.source, self.renderer, self.generate, self.collector,
            self.buffer_filter, *self.filters, *self.trackers, *self.middlewares, *self.media, *evals, self.launcher,
            *self.optimizers.values(), *self.algo.parts,
        )  # fmt: skip
        return tuple(part for part in parts if part is not None)

    @property
    def reward_parts(self) -> tuple[BoundPlugin, ...]:
        """The rewards of training and evaluation, each once."""
        rewards = [*self.rewards, *(reward for settings in self.evals for reward in settings.rewards)]
        return tuple({reward.part.spec().to_json(): reward.part for reward in rewards}.values())

    @property
    def other_launchers(self) -> str:
        """The flag that chooses another launcher, for messages: with those that are installed or can be."""
        names = {entry.name for entry in self.registry.entries(groups.LAUNCHERS)} | known_names(groups.LAUNCHERS)
        return f"--launcher {' or '.join(sorted(names - {self.launcher.entry.name}))}"

    @property
    def generates(self) -> bool:
        """True if training steps need an engine."""
        recorded = self.config.train.load_debug_train_data is not None
        return not recorded and bool(self.collector.driver.needs_engine(self.collector.config))

    @property
    def uses_rollout_workers(self) -> bool:
        return bool(self.config.rollout.rollout_workers) and (self.generates or bool(self.evals))

    @property
    def reads_prompts(self) -> bool:
        """True if training steps need the data source."""
        recorded = self.config.train.load_debug_train_data is not None
        return not recorded and bool(self.collector.driver.reads_prompts(self.collector.config))

    @property
    def records_schedule(self) -> bool:
        """True if the results depend on timing, so that the schedule is recorded."""
        return bool(self.collector.driver.across_steps)

    @property
    def rollout_seed(self) -> int:
        return self.config.rollout_seed

    @property
    def max_staleness(self) -> int:
        """Policy versions that a token may be behind when it is trained."""
        asked = self.config.rollout.max_staleness
        return self.least_staleness if asked is None else asked

    @property
    def least_staleness(self) -> int:
        """Policy versions that a token is behind at most if no rollout is late."""
        return self.config.rollout.max_async_level + self.config.sync.update_weights_interval - 1

    @property
    def routing_replay(self) -> RoutingReplay | None:
        """The source of the expert choices that the policy is trained with; None: its own forward."""
        train = self.config.train
        if train.use_rollout_routing_replay:
            return RoutingReplay.ROLLOUT
        return RoutingReplay.RECORDED if train.use_routing_replay else None

    @property
    def adapter_rank(self) -> int:
        """See `EngineSetup.adapter_rank`."""
        if self.transport is None or not (self.transport.driver.sends_adapters and self.updates_weights):
            return 0
        return int(self.backend.driver.adapter_rank(self.backend.config))

    @property
    def weights_follow(self) -> bool:
        """See `EngineSetup.weights_follow`."""
        whole = self.transport is not None and not self.adapter_rank
        return whole and self.updates_weights and self.config.sync.update_weights_interval == 1

    @property
    def refills(self) -> bool:
        """See `EngineSetup.refills`. Where groups are not collected across steps, one step follows the other."""
        rollout = self.config.rollout
        ahead = rollout.max_async_level if rollout.in_flight and self.collector.driver.across_steps else 0
        samples = (rollout.wave + ahead * rollout.rollout_batch_size) * rollout.n_samples_per_prompt
        return self.generates and samples > rollout.concurrency * self.config.launcher.num_engines

    @property
    def num_ranks(self) -> int:
        """Ranks of the policy."""
        launcher = self.config.launcher
        return count_ranks(self.backend, launcher.actor_num_nodes, launcher.actor_num_gpus_per_node)

    @property
    def rollouts_per_batch(self) -> int:
        return self.config.rollout.rollout_batch_size * self.config.rollout.n_samples_per_prompt

    @property
    def global_batch_size(self) -> int:
        """Rollouts per optimizer step."""
        train = self.config.train
        return train.global_batch_size or self.rollouts_per_batch // (train.num_steps_per_rollout or 1)

    @property
    def steps_per_rollout(self) -> int:
        return max(1, self.rollouts_per_batch // self.global_batch_size)

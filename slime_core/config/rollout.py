"""The `rollout` table: sampling, group sizes, filters, asynchrony."""

from __future__ import annotations

from typing import Literal, TypeAlias

from pydantic import Field

from slime_core.config.plugin_table import PluginTable
from slime_core.contracts.paths import RunPath
from slime_core.contracts.table import Table

RewardPolicy: TypeAlias = Literal["error", "fail_sample", "mask", "zero"]


class RolloutConfig(Table):
    """How the groups of a step are sampled, filtered and collected."""

    rollout_batch_size: int = Field(gt=0)
    """Prompts (groups) per rollout step."""
    n_samples_per_prompt: int = Field(1, gt=0)
    """Responses per prompt."""
    over_sampling_batch_size: int | None = Field(None, gt=0)
    """Groups submitted at once, at least rollout_batch_size; by default just that."""
    rollout_max_response_len: int = Field(gt=0)
    """Tokens a response may have."""
    rollout_max_prompt_len: int | None = Field(None, gt=0)
    """Longer prompts are filtered out and counted; by default rollout_max_context_len - 1. Prompts that leave the model no
    token for a response (max_position_embeddings) are always filtered out, and named at the start."""
    rollout_max_context_len: int | None = Field(None, gt=0)
    """Prompt and response together; by default no limit of its own."""
    rollout_temperature: float = Field(1.0, ge=1e-6)
    """Sampling temperature; trainer log-probs use the same."""
    rollout_top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling; other than 1 needs an engine that reports the kept ids."""
    rollout_top_k: int = Field(-1, ge=-1)
    """Top-k sampling, -1 for off; other than -1 needs an engine that reports the kept ids."""
    rollout_stop: tuple[str, ...] = ()
    """Strings that end a response."""
    rollout_stop_token_ids: tuple[int, ...] = ()
    """Token ids that end a response, besides the model's own."""
    rollout_skip_special_tokens: bool = False
    """Look for strings that end a response in its text without special tokens, in evaluations too. The response keeps them."""
    rollout_seed: int | None = None
    """Seed of shuffling and sampling; by default the run's seed."""
    filters: tuple[PluginTable, ...] = ()
    """Group filters, in order, after the recipe's own (dynamic sampling)."""
    buffer_filter: PluginTable = PluginTable(name="pop_first")
    """Chooses from the buffer before new prompts are drawn."""
    collector: PluginTable | None = None
    """Collector of a step's groups; `replay` reads them from a dump. By default the algorithm's choice, else `accepted`."""
    max_filtered_groups: int | None = Field(None, gt=0)
    """Rejected groups in one step after which the rollouts count as exhausted; by default 10 x rollout_batch_size, and
    1 x if every response of the step has failed, all with the same error."""
    on_exhausted: Literal["error", "finish"] = "error"
    """When the filters reject too many groups or the prompts end: the run fails (error), or it ends as after num_rollout
    (finish). A run that has trained nothing yet always fails."""
    max_retries: int = Field(3, ge=0)
    """How often a failed sample is generated again, and a request that was lost with its engine sent again."""
    use_fault_tolerance: bool = True
    """An engine that dies, hangs or fails is restarted and gets the weights; others take its requests. Off: the run ends."""
    rollout_health_check_interval: float = Field(30.0, gt=0)
    """Seconds between two health checks of an engine; none while it is paused or asleep."""
    rollout_health_check_timeout: float = Field(30.0, gt=0)
    """Seconds that an engine may take to respond to a health check."""
    rollout_health_check_first_wait: float = Field(0.0, ge=0)
    """Seconds from the start of an engine to its first health check."""
    max_engine_restarts: int = Field(3, ge=0)
    """Restarts of one engine within engine_restart_window after which its next failure ends the run."""
    engine_restart_window: float = Field(3600.0, gt=0)
    """Seconds after which a restart no longer counts."""
    engine_call_timeout: float = Field(600.0, gt=0)
    """Seconds that an engine may take to pause, to load a bucket of weights, and the like, before it counts as hung."""
    on_failed_group: Literal["requeue", "drop"] = "requeue"
    """Handling of a group whose samples still fail: its prompt goes back to the buffer, or is dropped; counted."""
    refill: Literal["drained", "eager"] = "drained"
    """When slots of rejected groups are filled again: once everything in flight has ended (drained), which keeps the
    composition of batches reproducible; or at once (eager), which is faster with long tails."""
    max_async_level: int = Field(0, ge=0)
    """Steps that rollouts run ahead of training. 0: synchronous; 1: the next step is generated while one is trained; more:
    fully asynchronous, at most (max_async_level + version + 1) x rollout_batch_size groups accepted or running since the
    start."""
    max_staleness: int | None = Field(None, ge=0)
    """Policy versions that a trained token may be behind; least and default: max_async_level + update_weights_interval - 1."""
    on_stale: Literal["requeue", "drop", "mask_old_spans"] = "requeue"
    """Handling of a finished group with tokens beyond max_staleness: it is generated again from its prompt (requeue),
    dropped, or trained without those tokens (mask_old_spans); counted."""
    update_weights_in_flight: bool | None = None
    """Update weights while rollouts are under way: engines pause for it, and unfinished responses continue with the new
    weights. Off: a weight update waits for the step that is being collected. By default on with `max_async_level` above 1."""
    partial_rollout: bool = False
    """When a step has its groups, abort the responses that still run and continue them in a later step (use it with
    over_sampling_batch_size). Requires max_staleness of 1 or more."""
    mask_offpolicy_in_partial_rollout: bool = False
    """Do not train the tokens that a response had when it was aborted, if a newer policy continued it."""
    concurrency: int = Field(512, gt=0)
    """Samples in flight per engine."""
    rollout_workers: int = Field(0, ge=0)
    """Processes that generate and score groups, each a share of them; 0: the run's own process."""
    rollout_worker_timeout: float = Field(300.0, gt=0)
    """Seconds for which a rollout worker's event loop may be blocked before the worker counts as hung and is replaced."""
    reward_key: str | None = None
    """Which of a reward's named numbers is trained on; by default the reward's own choice."""
    reward_select_key: str | None = None
    """Key of the samples' metadata that names the rewards of the run that count for them: a name, or a list of names.
    Without the key in the metadata, all of them."""
    reward_timeout: float | None = Field(None, gt=0, le=1e9)
    """Seconds that a reward may take for one group; by default the reward's own limit, and 30 if it has none."""
    reward_workers: int = Field(1, gt=0)
    """Worker processes for rewards; with rollout workers, of each."""
    reward_retries: int = Field(1, ge=0)
    """How often a group is scored again after a timeout, or when a worker process or a service was lost."""
    on_reward_failure: RewardPolicy = "error"
    """When a sample could not be scored: the run stops (error); the sample fails, and its group is handled by
    on_failed_group (fail_sample); the sample alone is left out of the batch and of its group's statistics (mask);
    or its reward is 0 (zero). Counted: rollout/reward_outcome/*."""
    on_reward_error: RewardPolicy | None = None
    """The same for rewards that raise, or are no finite number; by default on_reward_failure."""
    on_reward_timeout: RewardPolicy | None = None
    """The same for rewards that exceed their time limit; by default on_reward_failure."""
    on_reward_infra: RewardPolicy | None = None
    """The same for lost worker processes and services; by default on_reward_failure."""
    dump_rollouts: bool = False
    """Write each step's groups to rollouts/*.parquet in the run folder."""
    load_debug_rollout_data: RunPath | None = None
    """Folder of such a dump: steps come from there, as with the collector replay."""
    debug_rollout_only: bool = False
    """Generate and score, and train nothing: no trainer is started, and the engines keep the weights that they loaded."""

    @property
    def in_flight(self) -> bool:
        """Rollouts continue during a weight update."""
        return self.max_async_level > 1 if self.update_weights_in_flight is None else self.update_weights_in_flight

    @property
    def wave(self) -> int:
        """Groups submitted at once."""
        return self.over_sampling_batch_size or self.rollout_batch_size

"""The `eval` table: named sets, each with its own data, reward and sampling."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from slime_core.config.plugin_table import PluginTable
from slime_core.contracts.paths import RunPath
from slime_core.contracts.table import Table


class EvalDefaults(Table):
    """Settings of every set that does not have its own. Precedence: set > defaults > eval_* key > rollout_* key."""

    n_samples_per_eval_prompt: int | None = Field(None, gt=0)
    """Responses per prompt."""
    temperature: float | None = Field(None, ge=0)
    """0 is greedy."""
    top_p: float | None = Field(None, gt=0, le=1)
    """Nucleus sampling."""
    top_k: int | None = Field(None, ge=-1)
    """Top-k sampling."""
    max_response_len: int | None = Field(None, gt=0)
    """Tokens a response may have."""
    max_prompt_len: int | None = Field(None, gt=0)
    """Longer prompts are filtered out."""
    min_new_tokens: int | None = Field(None, ge=0)
    """Fewest tokens of a response."""
    repetition_penalty: float | None = Field(None, gt=0)
    """Divides the logits of tokens already seen."""
    stop: tuple[str, ...] | None = None
    """Strings that end a response."""
    stop_token_ids: tuple[int, ...] | None = None
    """Token ids that end a response."""
    reward: PluginTable | None = None
    """Reward of this set; by default the run's."""
    reward_key: str | None = None
    """Which of the reward's named numbers counts."""
    generate: PluginTable | None = None
    """Generator of this set; by default the run's."""
    input_key: str | None = None
    """Column of the prompt."""
    label_key: str | None = None
    """Column of the label."""
    tool_key: str | None = None
    """Column of the tools."""
    metadata_key: str | None = None
    """Column of the metadata; `*`: all columns but those of the prompt and of media."""
    apply_chat_template: bool | None = None
    """Render prompts through the tokenizer's template."""
    pass_threshold: float | None = None
    """A sample passes when its reward is at least this."""


class EvalSet(EvalDefaults):
    """One named evaluation set."""

    path: RunPath
    """File, with an optional slice (`test.jsonl@[0:200]`)."""
    metadata_overrides: dict[str, Any] = Field(default_factory=dict)
    """Added to the metadata of every prompt."""


class EvalConfig(Table):
    """When and on what to evaluate."""

    eval_interval: int | None = Field(None, gt=0)
    """Rollout steps between evaluations; by default only before and after."""
    skip_eval_before_train: bool = False
    """No evaluation before the first step."""
    async_eval: bool = False
    """Training continues while an evaluation runs; a checkpoint waits for its end. Its metrics are those of the policy
    versions from eval/version_min to eval/version_max. An evaluation that Ctrl-C aborts is repeated when the run resumes,
    with the weights that the run has then."""
    eval_blocks_weight_update: bool = True
    """A weight update waits for the end of an evaluation on the side, so that it has one policy version."""
    eval_prompt_data: tuple[str, ...] = ()
    """NAME PATH pairs, as slime has them; the table `datasets` has more settings."""
    datasets: dict[str, EvalSet] = Field(default_factory=dict)
    """Sets by name."""
    defaults: EvalDefaults = EvalDefaults()
    """For all sets."""
    n_samples_per_eval_prompt: int = Field(1, gt=0)
    """Responses per prompt."""
    eval_temperature: float | None = Field(None, ge=0)
    """By default rollout_temperature."""
    eval_top_p: float | None = Field(None, gt=0, le=1)
    """By default rollout_top_p."""
    eval_top_k: int | None = Field(None, ge=-1)
    """By default rollout_top_k."""
    eval_max_response_len: int | None = Field(None, gt=0)
    """By default rollout_max_response_len."""
    eval_max_prompt_len: int | None = Field(None, gt=0)
    """By default rollout_max_prompt_len."""
    eval_min_new_tokens: int = Field(0, ge=0)
    """Fewest tokens of a response."""
    eval_reward_key: str | None = None
    """By default reward_key."""
    eval_input_key: str | None = None
    """By default input_key."""
    eval_label_key: str | None = None
    """By default label_key."""
    eval_tool_key: str | None = None
    """By default tool_key."""
    pass_threshold: float = 1.0
    """A sample passes when its reward is at least this: for pass@k."""

    @model_validator(mode="before")
    @classmethod
    def sets_from_pairs(cls, value: Any) -> Any:
        """`eval_prompt_data` NAME PATH NAME PATH … becomes entries of `datasets`; a list of entries with a name too."""
        if not isinstance(value, dict):
            return value
        value = dict(value)
        sets = value.get("datasets", {})
        if isinstance(sets, list):
            for number, entry in enumerate(sets):
                if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
                    raise ValueError(f"datasets[{number}] must be a table with a name")
            refuse_duplicates([entry["name"] for entry in sets])
            sets = {entry["name"]: {k: v for k, v in entry.items() if k != "name"} for entry in sets}
        if not isinstance(sets, dict):
            raise ValueError("datasets must be a table of sets: [eval.datasets.NAME] with path = FILE")
        pairs = value.pop("eval_prompt_data", ())
        if not isinstance(pairs, list | tuple) or not all(isinstance(word, str) for word in pairs):
            raise ValueError("eval_prompt_data requires a list of NAME PATH pairs")
        if len(pairs) % 2:
            raise ValueError(f"eval_prompt_data requires NAME PATH pairs, got {len(pairs)} words")
        refuse_duplicates([*pairs[::2], *sets])
        named = {name: {"path": path} for name, path in zip(pairs[::2], pairs[1::2], strict=True)}
        return value | {"datasets": named | {k: {"path": v} if isinstance(v, str) else v for k, v in sets.items()}}


def refuse_duplicates(names: list[str]) -> None:
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"the sets {', '.join(twice)} are named twice; every set has a name of its own")

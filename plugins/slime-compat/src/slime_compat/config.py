"""Options of slime-compat."""

from __future__ import annotations

from typing import Any, Final, Literal

from pydantic import Field, field_validator, model_validator

from slime_core.contracts.driver import DriverConfig
from slime_core.contracts.paths import RunPath

REQUEST_TIMEOUT_S: Final = 600.0


class OldFunctionConfig(DriverConfig):
    path: str = Field(min_length=1)
    """Dotted path of the function: package.module.function."""
    python_path: tuple[RunPath, ...] = ()
    """Folders in which to look for its module, after the interpreter's own path."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Attributes of the function's argument `args`."""


class AskingFunctionConfig(OldFunctionConfig):
    """Options of functions that may send requests. Filters may not: they run in the event loop."""

    request_timeout: float = Field(REQUEST_TIMEOUT_S, gt=0)
    """Timeout in seconds of one request by `post` or `get` to anything but the run's engines."""


class CompatRewardConfig(AskingFunctionConfig):
    group: bool = False
    """True: the function takes (args, samples), the samples of a group, and returns a list of rewards."""


class CompatGeneratorConfig(AskingFunctionConfig):
    sample_hook_paths: tuple[str, ...] = ()
    """Functions (args, sample[, evaluation]) that are called with each returned sample, in order; upstream's rollout sample
    hooks. One that returns None keeps the sample, with what it has set."""
    missing_log_probs: Literal["error", "zero"] = "error"
    """How to handle trained tokens without rollout_log_probs that no engine of this episode generated at their position, such
    as text that was tokenized again. error: the sample fails, and the error names the first of them. zero: they are trained
    with log-prob 0, which is right only if nothing reads the rollout's log-probs; their metrics are wrong then."""


class CompatDumpConfig(DriverConfig):
    path: RunPath
    """Path of the dump of each step, with {rollout_id} in place of its number, as of --save-debug-rollout-data. Without it
    every step has the same samples."""
    subsample: float | None = Field(None, gt=0, le=1)
    """Share of the samples to use, half of them from the beginning and half from the end of a dump; unset: all."""
    missing_log_probs: Literal["error", "zero"] = "error"
    """How to handle samples without rollout_log_probs. zero: they are 0, which is right only if nothing reads them; their
    metrics are wrong then."""

    @field_validator("path")
    @classmethod
    def check_path(cls, path: RunPath) -> RunPath:
        try:
            str(path).format(rollout_id=0)
        except (KeyError, IndexError, ValueError, AttributeError) as error:
            raise ValueError(f"only {{rollout_id}} may be in braces: {error!r}") from error
        return path

    @property
    def is_one_file(self) -> bool:
        return self.path_of(0) == self.path_of(1)

    def path_of(self, step: int) -> str:
        return str(self.path).format(rollout_id=step)


class CompatCollectorConfig(DriverConfig):
    rollout_function_path: str | None = None
    """Function (args, rollout_id, data_source, evaluation) that returns the groups of a step; it replaces the group filters.
    Unset: groups are collected as without this plugin."""
    rollout_sample_filter_path: str | None = None
    """Function (args, groups) that sets remove_sample on samples of the accepted groups."""
    rollout_all_samples_process_path: str | None = None
    """Function (args, groups, data_source) of all finished groups, the rejected ones too."""
    reward_post_process_path: str | None = None
    """Function (args, samples) that returns the rewards as they were, and those to train on."""
    convert_samples_to_train_data_path: str | None = None
    """Function (args, samples) that returns a dict of columns: tokens, response_lengths, rewards, loss_masks and so on."""
    python_path: tuple[RunPath, ...] = ()
    """Folders in which to look for modules, after the interpreter's own path."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Attributes of the functions' argument `args`."""
    request_timeout: float = Field(REQUEST_TIMEOUT_S, gt=0)
    """Timeout in seconds of one request by `post` or `get` to anything but the run's engines."""
    missing_log_probs: Literal["error", "zero"] = "error"
    """As of the generator compat, for samples that a function makes itself."""

    @model_validator(mode="after")
    def _check(self) -> CompatCollectorConfig:
        of_default = (self.rollout_sample_filter_path, self.rollout_all_samples_process_path)
        if self.rollout_function_path is not None and any(of_default):
            raise ValueError(
                "rollout_function_path replaces the code that calls rollout_sample_filter_path and "
                "rollout_all_samples_process_path: call them in the rollout function."
            )
        if self.convert_samples_to_train_data_path is not None and self.reward_post_process_path is not None:
            raise ValueError(
                "convert_samples_to_train_data_path replaces the code that calls reward_post_process_path: call it there."
            )
        return self


class CompatSourceConfig(OldFunctionConfig):
    """`path` names a class."""

    input_key: str = "input"
    """The same as data.input_key: the column of the run's rows that gets the text of a sample's prompt."""


class CompatTrainerHooksConfig(DriverConfig):
    megatron_init_path: str | None = None
    """Function (args), called when process groups exist and random generators are seeded, before the model is built."""
    megatron_before_log_prob_hook_path: str | None = None
    """Function (args, model, store_prefix), called before each forward over a batch for log-probs or values. store_prefix: "",
    "ref_" or "teacher_"."""
    megatron_before_train_step_hook_path: str | None = None
    """Function (args, rollout_id, step_id, model, optimizer, opt_param_scheduler), called before each optimizer step. It may
    add to gradients, and set the step's learning rates."""
    python_path: tuple[RunPath, ...] = ()
    """Folders in which to look for modules, after the interpreter's own path."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Attributes of the functions' argument `args`, beside the rank's place and the backend's options."""

    @model_validator(mode="after")
    def _check(self) -> CompatTrainerHooksConfig:
        paths = [name for name in type(self).model_fields if name.endswith("_path") and name != "python_path"]
        if not any(getattr(self, name) for name in paths):
            raise ValueError(f"set one of {', '.join(paths)}")
        return self


class CompatReducerConfig(OldFunctionConfig):
    aggregation: Literal["seq_mean", "token_mean"] = "seq_mean"
    """The same as algo.aggregation (token_mean where calculate_per_token_loss is set): what the function replaces."""


class VerlRewardConfig(DriverConfig):
    path: RunPath
    """Python file of the function; `verl`: verl's own functions, which it chooses by data_source, if verl is installed."""
    function: str = Field("compute_score", min_length=1)
    """Its name."""
    reward_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of every call."""


class TrlRewardConfig(DriverConfig):
    path: str = Field(min_length=1)
    """Dotted path of the function: package.module.function."""
    python_path: tuple[RunPath, ...] = ()
    """Folders in which to look for its module, after the interpreter's own path."""

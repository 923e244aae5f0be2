"""OldTrainerHooks: calls old hooks of Megatron's trainers. OldPostWriteHook: calls an old hook of weights that were written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from torch import nn

from slime_compat.config import CompatTrainerHooksConfig, OldFunctionConfig
from slime_compat.old_args import OldArgs
from slime_compat.old_function import OldFunction, resolve, takes, wrong_form
from slime_compat.trainer_args import TrainerArgs
from slime_core.contracts.backend import ACTOR, REFERENCE, TEACHER
from slime_core.contracts.setup import EngineEndpoint, TrainerSetup
from slime_core.registry.boundary import foreign
from slime_training.hooks import HookedStep, PostWriteHook, TrainerHooks

TABLE: Final = "backend.hooks"
POST_WRITE: Final = "sync.post_write_hook"
PREFIXES: Final = {ACTOR: "", REFERENCE: "ref_", TEACHER: "teacher_"}
"""Weights of a forward to upstream's `store_prefix`."""
FORMS: Final = {
    "megatron_init_path": ("args",),
    "megatron_before_log_prob_hook_path": ("args", "model", "store_prefix"),
    "megatron_before_train_step_hook_path": (
        "args",
        "rollout_id",
        "step_id",
        "model",
        "optimizer",
        "opt_param_scheduler",
    ),
}
"""Option to the arguments of its function."""


class OldTrainerHooks(TrainerHooks):
    """Functions get the backend's own objects: Megatron's DistributedDataParallel modules, optimizer and schedule."""

    def __init__(self, config: CompatTrainerHooksConfig) -> None:
        """PluginError if a function is missing, or has another signature."""
        self._args = TrainerArgs(config.args, f"{TABLE}.args")
        self._per_token = bool(config.args.get("calculate_per_token_loss", False))
        self._paths = {option: path for option in FORMS if (path := getattr(config, option)) is not None}
        self._functions: dict[str, OldFunction] = {}
        for option, path in self._paths.items():
            function = resolve(path, config.python_path, where=f"{TABLE}.{option}")
            if not takes(function, len(FORMS[option])):
                raise wrong_form(path, function, f"{TABLE}.{option}", f"({', '.join(FORMS[option])})")
            self._functions[option] = function

    def after_init(self, setup: TrainerSetup, options: Mapping[str, Any]) -> None:
        self._args.start(setup, options)
        self._call("megatron_init_path")

    def before_log_probs(self, model: Sequence[nn.Module], weights: str) -> None:
        self._call("megatron_before_log_prob_hook_path", model, PREFIXES[weights])

    def before_train_step(self, step: HookedStep) -> None:
        option = "megatron_before_train_step_hook_path"
        self._call(option, step.rollout_id, step.step_id, step.model, step.optimizer, step.schedule)
        if self._per_token and option in self._functions:
            with foreign(self._title(option), "what it adds to gradients"):
                require_no_gradients(step.model)

    def _call(self, option: str, *values: Any) -> None:
        function = self._functions.get(option)
        if function is not None:
            with foreign(self._title(option), "call"):
                function(self._args, *values)

    def _title(self, option: str) -> str:
        return f'{TABLE}.{option} = "{self._paths[option]}"'


def require_no_gradients(model: Sequence[Any]) -> None:
    """ValueError if a buffer of gradients is not zero."""
    if any(
        bool(buffer.grad_data.any()) for chunk in model for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)
    ):
        raise ValueError(
            "upstream divides gradients that a hook adds by the number of trained tokens where --calculate-per-token-loss is "
            "given, and this is not done here. Leave that flag out, or write a loss (slime.losses)"
        )


class OldPostWriteHook(PostWriteHook):
    """Upstream calls the function on every rank, since each writes files. Here one rank writes, and it alone is called."""

    def __init__(self, config: OldFunctionConfig) -> None:
        """PluginError if the function is missing, or has another signature."""
        self._title = f'{POST_WRITE}.path = "{config.path}"'
        self._args = OldArgs({"rank": 0, "local_rank": 0} | config.args, f"{POST_WRITE}.args")
        self._function = resolve(config.path, config.python_path, where=f"{POST_WRITE}.path")
        if not takes(self._function, 3):
            raise wrong_form(config.path, self._function, f"{POST_WRITE}.path", "(args, version_dir, rollout_engines)")

    def __call__(self, folder: Path, engines: Sequence[EngineEndpoint]) -> None:
        with foreign(self._title, "call"):
            self._function(self._args, str(folder), [RolloutEngine(engine) for engine in engines])


class RolloutEngine:
    """In place of upstream's Ray actor of an engine. It has the server's `url` alone."""

    def __init__(self, endpoint: EngineEndpoint) -> None:
        self.url = endpoint.url

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f'rollout_engines has no "{name}": an engine is a server here, not an actor of Ray. Send requests to its url.',
            name=name,
            obj=self,
        )

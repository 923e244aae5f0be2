"""OldGenerator: calls an old generate function."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from slime_compat.config import CompatGeneratorConfig
from slime_compat.new_sample import SampleConversion
from slime_compat.old_args import OldArgs
from slime_compat.old_function import (
    OldFunction,
    finished,
    parameters,
    resolve,
    takes,
    takes_keyword,
    wrong_form,
)
from slime_compat.old_sample import old_prompt, old_sample
from slime_compat.requests import ROUTER_HOST, ROUTER_PORT, Asking, asking, limited, sampling_params_of
from slime_compat.written_tokens import WrittenTokens
from slime_core.contracts.generator import Episode, Generator
from slime_core.errors import PluginError, RolloutError
from slime_core.types.sample import Sample

FORMS = "(args, sample, sampling_params) or (args, samples, evaluation)"


class OldGenerator(Generator):
    def __init__(self, config: CompatGeneratorConfig) -> None:
        """PluginError if the function is missing, has another signature, or would block the event loop."""
        self._config = config
        self._function = resolve(config.path, config.python_path, where="generate.path")
        self._of_lists = parameters(self._function)[1:2] == ["samples"]
        if not takes(self._function, 2 if self._of_lists else 3):
            raise wrong_form(config.path, self._function, "generate.path", FORMS)
        if not inspect.iscoroutinefunction(self._function):
            raise PluginError(
                f'generate.path = "{config.path}": it is no coroutine (async def), so it would block the run while it waits.'
            )
        self._evaluation = takes_keyword(self._function, "evaluation")
        self._hooks = [self._hook(path) for path in config.sample_hook_paths]

    def _hook(self, path: str) -> OldFunction:
        where = "generate.sample_hook_paths"
        hook = resolve(path, self._config.python_path, where=where)
        if takes_keyword(hook, "rollout_id"):
            raise PluginError(
                f'{where} = "{path}": it takes rollout_id, which a response does not have: the steps of a run overlap. Use '
                "the filter, the collector or an observer, which are called for a step."
            )
        if not takes(hook, 2):
            raise wrong_form(path, hook, where, "(args, sample) or (args, sample, evaluation)")
        return hook

    async def generate(self, episode: Episode) -> Sequence[Sample]:
        """RolloutError if the function returns no valid sample."""
        if episode.prompt.images:
            raise RolloutError(f'generate.path = "{self._config.path}": old generate functions get no images.')
        index = episode.trajectory().index
        written = WrittenTokens(episode.kept)
        token = asking.set(Asking(episode, written))
        try:
            with limited(self._config.request_timeout, "generate.request_timeout"):
                returned = await self._hooked(await self._call(episode, index), episode)
        finally:
            asking.reset(token)
        conversion = SampleConversion(
            asked=f'generate.path = "{self._config.path}"',
            table="generate",
            reward_key=self._config.args.get("reward_key"),
            missing_log_probs=self._config.missing_log_probs,
            tokenizer=episode.tokenizer,
        )
        # Samples of one episode share its rollout id, whatever the function sets.
        return [
            conversion.convert(
                old, prompt=episode.prompt, index=index, rollout_id=index, written=written, version=episode.versions[-1]
            )
            for old in returned
        ]

    async def _call(self, episode: Episode, index: int) -> Any:
        old = old_prompt(episode.prompt, index) if episode.kept is None else old_sample(episode.kept)
        args = OldArgs(self._defaults(episode) | self._config.args, "generate.args", own=True)
        keywords = {"evaluation": episode.evaluation} if self._evaluation else {}
        if self._of_lists:
            return await self._function(args, [old], **keywords)
        return await self._function(args, old, sampling_params_of(episode.sampling), **keywords)

    async def _hooked(self, returned: Any, episode: Episode) -> list[Any]:
        """The returned samples, after the functions of sample_hook_paths."""
        samples = list(returned) if isinstance(returned, list | tuple) else [returned]
        args = OldArgs(self._defaults(episode) | self._config.args, "generate.args", own=True)
        for hook in self._hooks:
            keywords = {"evaluation": episode.evaluation} if takes_keyword(hook, "evaluation") else {}
            changed = [await finished(hook(args, sample, **keywords)) for sample in samples]
            samples = [old if new is None else new for old, new in zip(samples, changed, strict=True)]
        return samples

    def _defaults(self, episode: Episode) -> dict[str, Any]:
        """Attributes of `args` from the episode. The router's address is always the one that `post` intercepts."""
        return {
            "sglang_router_ip": ROUTER_HOST,
            "sglang_router_port": ROUTER_PORT,
            "sglang_server_concurrency": 512,
            "rollout_temperature": episode.sampling.temperature,
            "rollout_top_p": episode.sampling.top_p,
            "rollout_top_k": episode.sampling.top_k,
            "rollout_max_response_len": episode.sampling.max_new_tokens,
            "rollout_max_context_len": episode.max_context_len,
            "partial_rollout": False,
            "use_rollout_routing_replay": False,
        }

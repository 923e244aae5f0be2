"""OldCollector: calls old functions of a whole step: rollout function, sample filter, reward post-processing, conversion."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, Final, TypeAlias

from slime_compat.config import CompatCollectorConfig
from slime_compat.new_sample import SampleConversion
from slime_compat.old_args import OldArgs
from slime_compat.old_function import OldFunction, resolve, takes, wrong_form
from slime_compat.old_sample import Sample as Old
from slime_compat.old_sample import old_sample
from slime_compat.requests import ROUTER_HOST, ROUTER_PORT, asking, limited
from slime_compat.rollout_call import RolloutCall, calling
from slime_compat.rollout_output import RolloutFnTrainOutput, call_rollout_fn
from slime_compat.train_data import samples_of
from slime_core.contracts.collector import Collector
from slime_core.errors import PluginError, RolloutError
from slime_core.rollout.context import RolloutContext
from slime_core.types.sample import Sample, SampleGroup
from slime_sources.accepted import AcceptedGroups

Rejected: TypeAlias = tuple[SampleGroup, str]
TABLE: Final = "rollout.collector"
FORMS: Final[Mapping[str, tuple[str, int]]] = {
    "rollout_function_path": ("(args, rollout_id, data_source, evaluation=...)", 3),
    "rollout_sample_filter_path": ("(args, groups)", 2),
    "rollout_all_samples_process_path": ("(args, groups, data_source)", 3),
    "reward_post_process_path": ("(args, samples)", 2),
    "convert_samples_to_train_data_path": ("(args, samples)", 2),
}
"""Option -> how its function is called, and with how many positional arguments."""


class OldCollector(Collector[RolloutContext]):
    def __init__(self, config: CompatCollectorConfig) -> None:
        """PluginError if a function is missing, or has another signature."""
        self._config = config
        self._functions = {option: self._resolve(option) for option in FORMS if getattr(config, option) is not None}
        self._accepted = AcceptedGroups()

    def _resolve(self, option: str) -> OldFunction:
        path, where = getattr(self._config, option), f"{TABLE}.{option}"
        function = resolve(path, self._config.python_path, where=where)
        form, count = FORMS[option]
        if not takes(function, count):
            raise wrong_form(path, function, where, form)
        if inspect.iscoroutinefunction(function):
            raise PluginError(
                f'{where} = "{path}": it is a coroutine (async def). It is called as {form} and not awaited.'
            )
        return function

    async def collect(self, step: int, context: RolloutContext) -> list[SampleGroup]:
        if "rollout_function_path" in self._functions:
            groups, rejected = await self._called(step, context)
        else:
            groups, rejected = await self._collected(step, context)
            groups = self._filtered(groups, [group for group, _ in rejected], context)
        groups = self._converted(self._post_processed(groups, context), context)
        context.observe(step, groups, rejected)
        return groups

    async def _collected(self, step: int, context: RolloutContext) -> tuple[list[SampleGroup], list[Rejected]]:
        rejected: list[Rejected] = []

        def observe(step: int, accepted: Sequence[SampleGroup], of_step: Sequence[Rejected]) -> None:
            rejected.extend(of_step)

        return await self._accepted.collect(step, replace(context, observe=observe)), rejected

    # --- the rollout function -----------------------------------------------------------------------------------------

    async def _called(self, step: int, context: RolloutContext) -> tuple[list[SampleGroup], list[Rejected]]:
        function = self._functions["rollout_function_path"]
        args = self._args(context)
        conversion = self._conversion("rollout_function_path", context)
        call = RolloutCall(step, context, conversion, with_messages=not args.apply_chat_template)

        def run_function() -> RolloutFnTrainOutput:
            with limited(self._config.request_timeout, f"{TABLE}.request_timeout"):
                output = call_rollout_fn(function, args, step, call, evaluation=False)
            if not isinstance(output, RolloutFnTrainOutput) or not isinstance(output.samples, Sequence):
                raise RolloutError(
                    f"{call.asked}: it returned {type(output).__name__}; it must return RolloutFnTrainOutput or groups of "
                    "samples."
                )
            return output

        tokens = calling.set(call), asking.set(call.asking())
        try:
            output = await asyncio.to_thread(run_function)
            groups = call.groups(output)
        finally:
            calling.reset(tokens[0])
            asking.reset(tokens[1])
            await call.close()
        for name, value in (output.metrics or {}).items():
            context.counts[name] += value
        return groups, call.rejected

    # --- the other functions ------------------------------------------------------------------------------------------

    def _filtered(
        self, groups: list[SampleGroup], rejected: Sequence[SampleGroup], context: RolloutContext
    ) -> list[SampleGroup]:
        """Calls the sample filter on the accepted groups, then the function of all groups, on the same samples."""
        sample_filter = self._functions.get("rollout_sample_filter_path")
        process = self._functions.get("rollout_all_samples_process_path")
        if sample_filter is None and process is None:
            return groups
        option = "rollout_sample_filter_path" if sample_filter is not None else "rollout_all_samples_process_path"
        conversion = self._conversion(option, context)
        in_order = sorted([*groups, *rejected], key=lambda group: group.samples[0].index)
        olds = {id(group): [old_sample(sample) for sample in group.samples] for group in in_order}
        accepted = [olds[id(group)] for group in groups]
        if sample_filter is not None:
            sample_filter(self._args(context), accepted)
        if process is not None:
            process(self._args(context), [olds[id(group)] for group in in_order], NoDataSource(conversion.asked))
        return [self._applied(group, olds[id(group)], conversion) for group in groups]

    def _applied(self, group: SampleGroup, olds: Sequence[Old], conversion: SampleConversion) -> SampleGroup:
        for sample, old in zip(group.samples, olds, strict=True):
            if list(old.tokens) != sample.tokens.tolist():
                raise conversion.failure(sample.index)("has other tokens than before: they were not generated so")
        pairs = zip(group.samples, olds, strict=True)
        return replace(group, samples=tuple(conversion.applied(sample, old) for sample, old in pairs))

    def _post_processed(self, groups: list[SampleGroup], context: RolloutContext) -> list[SampleGroup]:
        function = self._functions.get("reward_post_process_path")
        if function is None:
            return groups
        olds = [[old_sample(sample) for sample in group.samples] for group in groups]
        flat = list(chain.from_iterable(olds))
        conversion = self._conversion("reward_post_process_path", context)
        returned = function(self._args(context), flat)
        lengths = [len(column) for column in returned] if isinstance(returned, tuple | list) else None
        if lengths != [len(flat)] * 2:
            raise RolloutError(
                f"{conversion.asked}: it returned {type(returned).__name__} of lengths {lengths}; it must return two "
                f"lists, the rewards as they were and those to train on, with {len(flat)} numbers each."
            )
        raw, rewards = (iter([float(value) for value in column]) for column in returned)
        done = []
        for group, of_group in zip(groups, olds, strict=True):
            samples = [
                replace(
                    self._applied_one(sample, old, conversion),
                    reward=next(rewards),
                    reward_parts={**sample.reward_parts, "raw_reward": next(raw)},
                    span_rewards=(),
                )
                for sample, old in zip(group.samples, of_group, strict=True)
            ]
            done.append(replace(group, samples=tuple(samples)))
        return done

    def _applied_one(self, sample: Sample, old: Old, conversion: SampleConversion) -> Sample:
        # The function returns the rewards: what it may have set on samples in between does not count.
        old.reward = dict(sample.reward_parts) or sample.reward
        return conversion.applied(sample, old)

    def _converted(self, groups: list[SampleGroup], context: RolloutContext) -> list[SampleGroup]:
        function = self._functions.get("convert_samples_to_train_data_path")
        if function is None:
            return groups
        conversion = self._conversion("convert_samples_to_train_data_path", context)
        samples = [sample for group in groups for sample in group.samples]
        columns = function(self._args(context), [old_sample(sample) for sample in samples])
        return samples_of(columns, groups, conversion)

    def _args(self, context: RolloutContext) -> OldArgs:
        """Attributes that a step has by itself. The router's address is the one that `post` intercepts."""
        rollout = context.config
        own = {
            "sglang_router_ip": ROUTER_HOST,
            "sglang_router_port": ROUTER_PORT,
            "rollout_batch_size": rollout.rollout_batch_size,
            "over_sampling_batch_size": rollout.wave,
            "n_samples_per_prompt": rollout.n_samples_per_prompt,
            "rollout_max_response_len": rollout.rollout_max_response_len,
            "rollout_max_context_len": rollout.rollout_max_context_len,
            "rollout_temperature": rollout.rollout_temperature,
            "rollout_top_p": rollout.rollout_top_p,
            "rollout_top_k": rollout.rollout_top_k,
            "rollout_global_dataset": True,
            "reward_key": rollout.reward_key,
            "apply_chat_template": context.data.apply_chat_template,
        }
        return OldArgs(own | self._config.args, f"{TABLE}.args", own=True)

    def _conversion(self, option: str, context: RolloutContext) -> SampleConversion:
        return SampleConversion(
            asked=f'{TABLE}.{option} = "{getattr(self._config, option)}"',
            table=TABLE,
            reward_key=self._config.args.get("reward_key", context.config.reward_key),
            missing_log_probs=self._config.missing_log_probs,
            tokenizer=context.tokenizer,
        )


class NoDataSource:
    """The data source that a function of all samples gets: its step is complete, so it may not draw or put back prompts."""

    def __init__(self, asked: str) -> None:
        self._asked = asked

    def __getattr__(self, name: str) -> Any:
        raise RolloutError(f"{self._asked}: data_source.{name} is not available, since the step is complete.")

    def __call__(self, num_samples: int) -> Any:
        raise RolloutError(f"{self._asked}: data_source is not available, since the step is complete.")

"""Upstream's own functions through slime-compat beside upstream's own code, by hand: functions.py CHECKOUT

Prints a row for each function; exits with 1 if a result differs. The checkout needs what it imports: pylatexenc, aiohttp,
omegaconf, pybase64, and Megatron-core (`make .venv/.megatron`). Two processes: direct.py imports nothing of this project.
"""

from __future__ import annotations

import asyncio
import json
import os
import string
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import cases
import numpy as np

from slime_compat.config import CompatCollectorConfig, CompatGeneratorConfig, CompatRewardConfig, CompatSourceConfig
from slime_compat.config import OldFunctionConfig as FunctionConfig
from slime_compat.plugin import (
    CompatBufferFilter,
    CompatCollector,
    CompatCorrection,
    CompatFilter,
    CompatGenerator,
    CompatReward,
    CompatSource,
)
from slime_core.algorithm.build_batch import build_batch
from slime_core.config.rollout import RolloutConfig
from slime_core.config.run import DataConfig
from slime_core.contracts.filter import Versions
from slime_core.data.buffer import DataBuffer
from slime_core.data.pop_first import PopFirstFilter
from slime_core.rollout.context import RolloutContext
from slime_core.rollout.groups import GroupRunner, GroupSettings
from slime_core.rollout.single_turn import SingleTurn
from slime_core.types.batch import TokenColumns
from slime_core.types.buffer_item import BufferItem, ItemKind
from slime_core.types.completion import FinishReason, GenerateRequest, SamplingParams
from slime_core.types.prompt import Prompt
from slime_core.types.sample import Sample, SampleGroup, Status, VersionSpan
from slime_models.new_model import character_tokenizer
from slime_plugin_kit.scripted_engine import ScriptedEngine
from slime_plugin_kit.scripted_rollout import NumberedPrompts, client_of, episode_of
from slime_sources.rendering.prompt_renderer import PromptRenderer

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class Replies(ScriptedEngine):
    """Responds as the router of direct.py."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__()
        self._tokenizer = tokenizer

    def script(self, request: GenerateRequest) -> tuple[np.ndarray[Any, np.dtype[np.int32]], FinishReason]:
        text = cases.reply_to(request.token_ids.tolist())
        return np.array(self._tokenizer(text, add_special_tokens=False)["input_ids"], np.int32), FinishReason.STOP


class Compat:
    def __init__(self, checkout: Path, folder: Path, tokenizer: Any) -> None:
        parts = ("", "examples/search-r1", "examples/retool", "tests/plugin_contracts", "tests")
        self.python_path = tuple(str(checkout / part) for part in parts)
        self.folder = folder
        self.tokenizer = tokenizer

    def ids(self, text: str) -> np.ndarray[Any, np.dtype[np.int32]]:
        return np.array(self.tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)

    def prompt(self, number: int = 0, text: str = cases.QUESTION, label: Any = "4", **more: Any) -> Prompt:
        return Prompt(group_index=number, text=text, token_ids=self.ids(text), label=label, **more)

    def sample(self, prompt: Prompt, text: str, index: int = 0, reward: float | None = None) -> Sample:
        ids = self.ids(text)
        return Sample(
            index=index, group_index=prompt.group_index, rollout_id=index, prompt=prompt,
            tokens=np.concatenate([prompt.token_ids, ids]), prompt_length=len(prompt.token_ids),
            loss_mask=np.ones(len(ids), np.uint8), rollout_log_probs=np.full(len(ids), -1, np.float32), response=text,
            spans=(VersionSpan(0, 0, len(ids)),) if len(ids) else (), status=Status.COMPLETED, reward=reward,
        )  # fmt: skip

    def rewards(self, path: str, label: Any, *, group: bool = False, **args: Any) -> Any:
        config = CompatRewardConfig(path=path, python_path=self.python_path, args=args, group=group)
        prompt = self.prompt(label=label)
        samples = tuple(self.sample(prompt, text, index) for index, text in enumerate(cases.ANSWERS))
        values = CompatReward.build(config).score(SampleGroup(prompt=prompt, samples=samples))
        return [value if isinstance(value, dict) else float(value) for value in values]

    def generated(self, path: str) -> Any:
        args = {"hf_checkpoint": str(self.folder), "rollout_max_context_len": 8192, "ci_test": False}
        config = CompatGeneratorConfig(path=path, python_path=self.python_path, args=args)
        generator = CompatGenerator.build(config)

        async def all_of_them() -> list[Any]:
            found = []
            for number in range(3):
                episode = episode_of(client_of(Replies(self.tokenizer)), budget=cases.MAX_NEW_TOKENS)
                prompt = self.prompt(number, f"{number}+{number}=")
                episode = replace(episode, prompt=prompt, index=number, tokenizer=self.tokenizer)
                found.append([described(sample) for sample in await generator.generate(episode)])
            return found

        return asyncio.run(all_of_them())

    def filtered(self, path: str) -> Any:
        judge = CompatFilter.build(FunctionConfig(path=path, python_path=self.python_path))
        decisions = [judge.decide(group) for group in self.groups()]
        return [[decision.keep, decision.reason or None, decision.keep_when_insufficient] for decision in decisions]

    def groups(self) -> list[SampleGroup]:
        found = []
        for number, rewards in enumerate(cases.REWARDS):
            prompt = self.prompt(number)
            samples = [self.sample(prompt, "4", 4 * number + place, reward) for place, reward in enumerate(rewards)]
            found.append(SampleGroup(prompt=prompt, samples=tuple(samples)))
        return found

    def context(self, size: int, prompts: Any, **data: Any) -> RolloutContext:
        settings = GroupSettings(
            scope="train", num_samples=1, sampling=SamplingParams(max_new_tokens=8), seed=0, max_context_len=None,
            scoring=None, evaluation=False, max_retries=0,
        )  # fmt: skip
        runner = GroupRunner(
            settings, generator=SingleTurn(), client=client_of(Replies(self.tokenizer)), tokenizer=self.tokenizer,
            rewards=None, on_failure=lambda failure: None,
        )  # fmt: skip
        return RolloutContext(
            config=RolloutConfig(rollout_batch_size=size, n_samples_per_prompt=1, rollout_max_response_len=8),
            data=DataConfig(**data), tokenizer=self.tokenizer, buffer=DataBuffer(prompts, PopFirstFilter()),
            runner=runner, filters=(), observe=lambda step, accepted, rejected: None,
        )  # fmt: skip

    def of_step(self, **options: Any) -> list[SampleGroup]:
        """The functions of a step on groups that are collected already."""
        collector = CompatCollector.build(CompatCollectorConfig(python_path=self.python_path, **options))
        context = self.context(len(cases.REWARDS), NumberedPrompts())
        return collector._converted(collector._post_processed(self.groups(), context), context)

    def post_processed(self, path: str) -> Any:
        samples = [s for group in self.of_step(reward_post_process_path=path) for s in group.samples]
        return [[s.reward_parts["raw_reward"] for s in samples], [s.reward for s in samples]]

    def converted(self, path: str) -> Any:
        samples = [s for group in self.of_step(convert_samples_to_train_data_path=path) for s in group.samples]
        rewards = [[s.reward for s in samples], [s.reward_parts["raw_reward"] for s in samples]]
        tokens = [[s.tokens.tolist() for s in samples], [s.response_length for s in samples]]
        return [*tokens, *rewards, [s.loss_mask.tolist() for s in samples]]

    def corrected(self, path: str, **args: Any) -> Any:
        prompt = replace(self.prompt(), text="2", token_ids=self.ids("2"))
        samples = []
        for index, (mask, reported) in enumerate(zip(cases.MASKS, cases.SAMPLED, strict=True)):
            made = self.sample(prompt, "x" * len(mask), index, 0.0)
            samples.append(
                replace(made, loss_mask=np.array(mask, np.uint8), rollout_log_probs=np.array(reported, np.float32))
            )
        batch = build_batch([SampleGroup(prompt=prompt, samples=tuple(samples))])
        columns = TokenColumns(old_log_probs=np.concatenate(cases.TRAINED).astype(np.float32))
        correction = CompatCorrection.build(FunctionConfig(path=path, python_path=self.python_path, args=args))
        found = correction.correct_batch(batch, columns)
        metrics = {name: (column * batch.mask).tolist() for name, column in found.metrics.items()}
        return {"weights": np.where(found.keep, found.weights, 0).tolist(), **metrics}

    def drawn(self, path: str) -> Any:
        args = {
            "prompt_data": str(self.folder / "train.jsonl"), "hf_checkpoint": str(self.folder), "dump_details": None,
            "input_key": "input", "multimodal_keys": None, "label_key": "label", "metadata_key": "metadata",
            "tool_key": None, "apply_chat_template": False, "apply_chat_template_kwargs": {}, "rollout_shuffle": True,
            "n_samples_per_prompt": 2, "buffer_filter_path": None,
        }  # fmt: skip
        config = CompatSourceConfig(path=path, python_path=self.python_path, args=args)
        renderer = PromptRenderer(tokenizer=self.tokenizer, input_key="input")
        source = CompatSource.build(config)(renderer, seed=42)
        found = []
        for count in cases.DRAWS:
            found.append([[p.text, p.label, dict(p.metadata)] for p in source.take(count)])
            # As a run that is resumed after each step.
            state = json.loads(json.dumps(source.state()))
            source = CompatSource.build(config)(renderer, seed=42)
            source.restore(state)
        return found

    def popped(self, path: str) -> Any:
        items = [BufferItem(prompt=self.prompt(number), kind=ItemKind.RETURNED) for number in range(5)]
        chooser = CompatBufferFilter.build(FunctionConfig(path=path, python_path=self.python_path))
        return chooser.select(items, 3, Versions(trained=0, max_staleness=0, oldest=(None,) * 5))

    def supervised(self, path: str) -> Any:
        class Conversations(NumberedPrompts):
            def take(source, count: int) -> list[Prompt]:
                talks = cases.CONVERSATIONS[source.num_drawn : source.num_drawn + count]
                source.num_drawn += count
                return [self.prompt(n, messages=talk) for n, talk in enumerate(talks)]

        args = {"hf_checkpoint": str(self.folder), "loss_mask_type": "qwen", "apply_chat_template": False}
        config = CompatCollectorConfig(
            rollout_function_path=path, python_path=self.python_path, args=args, missing_log_probs="zero"
        )

        async def collect() -> list[SampleGroup]:
            return await CompatCollector.build(config).collect(0, self.context(2, Conversations()))

        samples = [sample for group in asyncio.run(collect()) for sample in group.samples]
        return [[s.tokens.tolist(), s.loss_mask.tolist(), s.response_length] for s in samples]


def described(sample: Sample) -> Any:
    return {
        "tokens": sample.tokens.tolist(),
        "loss_mask": sample.loss_mask.tolist(),
        "rollout_log_probs": sample.rollout_log_probs.tolist(),
        "status": sample.status.value,
        "response": sample.raw_response,
    }


def through_compat(compat: Compat, name: str) -> tuple[str, Callable[[], Any]]:
    """The kind of the hook, and the call."""
    path, _, variant = name.partition(", ")
    last = path.rpartition(".")[2]
    if last == "batched_async_rm":
        return "reward of a group", lambda: compat.rewards(path, "4", group=True, rm_type="dapo")
    if last == "async_rm":
        return "reward", lambda: compat.rewards(path, cases.LABELS[variant], rm_type=variant)
    if last == "reward_func":
        return "reward", lambda: compat.rewards(path, cases.SEARCH_LABEL if "search" in path else "4")
    if last in ("generate", "compact_generate"):
        return "generator", lambda: compat.generated(path)
    if last.startswith("check_reward"):
        return "group filter", lambda: compat.filtered(path)
    if last in ("grpo_normalize_by_group_index", "reference_reward_post_process"):
        return "reward post-processing", lambda: compat.post_processed(path)
    if last == "reference_convert_samples_to_train_data":
        return "conversion to train data", lambda: compat.converted(path)
    if last.startswith("RolloutDataSource"):
        return "data source", lambda: compat.drawn(path)
    if last == "pop_first":
        return "buffer filter", lambda: compat.popped(path)
    if last == "generate_rollout":
        return "rollout function", lambda: compat.supervised(path)
    args = cases.MIS_COMMON | cases.MIS[variant] if variant else cases.TIS
    return "TIS function", lambda: compat.corrected(path, **args)


def same(one: Any, other: Any) -> bool:
    """Equal, numbers to float32."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float) or isinstance(other, float):
        return bool(np.isclose(one, other, rtol=1e-6, atol=1e-7))
    return bool(one == other)


def main(checkout: Path) -> int:
    tokenizer = character_tokenizer("".join(c for c in string.printable if c not in "\r\x0b\x0c"))
    tokenizer.chat_template = TEMPLATE
    here = Path(__file__).parent
    os.environ["HF_HUB_OFFLINE"] = "1"
    # Nothing is written into the checkout.
    sys.dont_write_bytecode = True
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        tokenizer.save_pretrained(folder)
        rows = [{"input": f"{n}+1=", "label": str(n + 1), "metadata": {"row": n}} for n in range(cases.ROWS)]
        (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        subprocess.run([sys.executable, "-B", here / "direct.py", checkout, folder], check=True, cwd=folder)
        expected = json.loads((folder / "direct.json").read_text(encoding="utf-8"))
        compat = Compat(checkout, folder, tokenizer)
        failed = 0
        for name, result in expected.items():
            kind, call = through_compat(compat, name)
            found = json.loads(json.dumps(call()))
            equal = same(found, result)
            failed += not equal
            print(f"{'equal' if equal else 'DIFFERS':8} {kind:24} {name}", flush=True)
            if not equal:
                print(f"  upstream     {result}\n  slime-compat {found}")
        functions = {name.partition(", ")[0] for name in expected}
        print(f"{len(functions)} functions, {len(expected)} rows, {failed} differ")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve()))

"""Upstream's functions called by nothing but upstream's own code: `direct.py CHECKOUT FOLDER` writes FOLDER/direct.json.

FOLDER has the tokenizer and the data file. Imports nothing of this project.
"""

from __future__ import annotations

import asyncio
import copy
import json
import os
import sys
import threading
from argparse import Namespace
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import cases

CHECKOUT, FOLDER = Path(sys.argv[1]), Path(sys.argv[2])
sys.path[:0] = [
    str(CHECKOUT / part) for part in ("", "examples/search-r1", "examples/retool", "tests/plugin_contracts", "tests")
]

import torch  # noqa: E402
from slime.rollout.data_source import RolloutDataSource, RolloutDataSourceWithBuffer, pop_first  # noqa: E402
from slime.utils.http_utils import init_http_client  # noqa: E402
from slime.utils.misc import load_function  # noqa: E402
from slime.utils.types import Sample  # noqa: E402
from transformers import AutoTokenizer  # noqa: E402

TOKENIZER = AutoTokenizer.from_pretrained(FOLDER)


class Router(BaseHTTPRequestHandler):
    """SGLang's /generate."""

    def do_POST(self) -> None:
        payload = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        given = payload.get("input_ids") or TOKENIZER(payload["text"], add_special_tokens=False)["input_ids"]
        text = cases.reply_to(given)
        ids = TOKENIZER(text, add_special_tokens=False)["input_ids"]
        meta = {
            "id": "1",
            "finish_reason": {"type": "stop", "matched": ids[-1]},
            "output_token_logprobs": [[cases.log_prob_of(token), token, None] for token in ids],
            "weight_version": "7",
            "prompt_tokens": len(given),
            "completion_tokens": len(ids),
            "cached_tokens": 0,
        }
        body = json.dumps({"text": text, "output_ids": ids, "meta_info": meta}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words: Any) -> None:
        pass


def args_of(**more: Any) -> Namespace:
    plain = {
        "rm_type": None, "custom_rm_path": None, "reward_key": None, "eval_reward_key": None, "group_rm": False, "rm_url": None,
        "partial_rollout": False, "hf_checkpoint": str(FOLDER), "sglang_server_concurrency": 8, "rollout_num_gpus": 1,
        "rollout_num_gpus_per_engine": 1, "use_distributed_post": False, "rollout_temperature": 1.0, "rollout_top_p": 1.0,
        "rollout_top_k": -1, "rollout_max_response_len": cases.MAX_NEW_TOKENS, "rollout_stop": None,
        "rollout_stop_token_ids": None, "rollout_skip_special_tokens": False, "sglang_dp_size": 1, "ci_test": False,
        "use_rollout_routing_replay": False, "rollout_max_context_len": 8192, "sglang_router_ip": "127.0.0.1",
        "rollout_global_dataset": True, "prompt_data": str(FOLDER / "train.jsonl"), "dump_details": None,
        "rollout_max_prompt_len": None, "input_key": "input", "multimodal_keys": None, "label_key": "label",
        "metadata_key": "metadata", "tool_key": None, "apply_chat_template": False, "apply_chat_template_kwargs": {},
        "rollout_seed": 42, "rollout_shuffle": True, "n_samples_per_prompt": 2, "buffer_filter_path": None, "save": None,
        "load": None, "loss_mask_type": "qwen", "rollout_batch_size": 2, "grpo_std_normalization": True,
    }  # fmt: skip
    return Namespace(**plain | more)


def scored(text: str, label: Any, **more: Any) -> Sample:
    tokens = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    prompt = TOKENIZER(cases.QUESTION, add_special_tokens=False)["input_ids"]
    return Sample(
        prompt=cases.QUESTION, response=text, label=label, tokens=[*prompt, *tokens], response_length=len(tokens),
        status=Sample.Status.COMPLETED, **more,
    )  # fmt: skip


def plain(value: Any) -> Any:
    """As numbers of JSON: of a dict the numbers alone."""
    if isinstance(value, dict):
        return {key: float(number) for key, number in value.items() if isinstance(number, bool | int | float)}
    return float(value)


def rewards(path: str, label: Any, **more: Any) -> Any:
    function = load_function(path)

    async def all_of_them() -> list[Any]:
        return [await function(args_of(**more), scored(text, label)) for text in cases.ANSWERS]

    return [plain(value) for value in asyncio.run(all_of_them())]


def group_rewards(path: str) -> Any:
    samples = [scored(text, "4") for text in cases.ANSWERS]
    return [plain(value) for value in asyncio.run(load_function(path)(args_of(rm_type="dapo"), samples))]


def generated(path: str, router: int) -> Any:
    args = args_of(sglang_router_port=router)

    async def all_of_them() -> list[Any]:
        init_http_client(args)
        function = load_function(path)
        params = {"max_new_tokens": cases.MAX_NEW_TOKENS, "temperature": 1.0, "top_p": 1.0, "top_k": -1}
        found = []
        for number in range(3):
            sample = Sample(prompt=f"{number}+{number}=", index=number, label="4")
            returned = await function(args, sample, dict(params))
            found.append([described(each) for each in (returned if isinstance(returned, list) else [returned])])
        return found

    return asyncio.run(all_of_them())


def described(sample: Sample) -> Any:
    return {
        "tokens": [int(token) for token in sample.tokens],
        "loss_mask": sample.loss_mask or [1] * sample.response_length,
        "rollout_log_probs": [float(value) for value in sample.rollout_log_probs or []],
        "status": sample.status.value,
        "response": sample.response,
    }


def filtered(path: str) -> Any:
    found = []
    for group in cases.REWARDS:
        output = load_function(path)(args_of(), [scored("4", "4", reward=reward) for reward in group])
        keep = bool(output.keep)
        # The last one has no effect on a group that is kept anyway.
        found.append([keep, output.reason, output.keep_when_insufficient and not keep])
    return found


def step_samples() -> list[Sample]:
    return [
        scored("4", "4", reward=reward, group_index=group, index=4 * group + place, rollout_id=4 * group + place)
        for group, of_group in enumerate(cases.REWARDS)
        for place, reward in enumerate(of_group)
    ]


def post_processed(path: str) -> Any:
    raw, rewards = load_function(path)(args_of(), step_samples())
    return [[float(value) for value in raw], [float(value) for value in rewards]]


def converted(path: str) -> Any:
    samples = step_samples()
    for sample in samples:
        sample.loss_mask = [1] * sample.response_length
    columns = load_function(path)(args_of(), samples)
    return [columns[name] for name in ("tokens", "response_lengths", "rewards", "raw_reward", "loss_masks")]


def corrected(path: str, **more: Any) -> Any:
    def tensors(rows: Any) -> list[torch.Tensor]:
        return [torch.tensor(row, dtype=torch.float32) for row in rows]

    loss, masks, metrics = load_function(path)(
        args=Namespace(**more),
        pg_loss=torch.ones(sum(map(len, cases.MASKS))),
        train_log_probs=tensors(cases.TRAINED),
        rollout_log_probs=tensors(cases.SAMPLED),
        loss_masks=[torch.tensor(row, dtype=torch.int) for row in cases.MASKS],
        total_lengths=[1 + len(row) for row in cases.MASKS],
        response_lengths=[len(row) for row in cases.MASKS],
    )
    mask = torch.tensor([number for row in cases.MASKS for number in row])
    weights = loss * torch.cat([column.float() for column in masks]) * mask
    return {"weights": weights.tolist(), **{name: (value.float() * mask).tolist() for name, value in metrics.items()}}


def drawn(kind: type) -> Any:
    source = kind(args_of())
    return [
        [[s.prompt, s.label, s.metadata] for group in source.get_samples(n) for s in group[:1]] for n in cases.DRAWS
    ]


def popped() -> Any:
    buffer = [[Sample(group_index=number)] for number in range(5)]
    return [group[0].group_index for group in pop_first(args_of(), None, buffer, 3)]


def supervised(path: str) -> Any:
    class Source:
        def get_samples(self, count: int) -> list[list[Sample]]:
            return [[Sample(prompt=copy.deepcopy(talk), index=n)] for n, talk in enumerate(cases.CONVERSATIONS[:count])]

    returned = load_function(path)(args_of(), 0, Source(), evaluation=False)
    samples = [sample for (sample,) in returned]
    return [[list(sample.tokens), list(sample.loss_mask), sample.response_length] for sample in samples]


def one_rank() -> None:
    """Megatron's groups of one rank, which cp_utils asks."""
    from megatron.core import mpu

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}
    torch.distributed.init_process_group("gloo", init_method=f"file://{FOLDER}/rendezvous", rank=0, world_size=1)
    mpu.initialize_model_parallel()


def main() -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Router)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    router = server.server_address[1]
    rm, mis = "slime.rollout.rm_hub", "examples.train_infer_mismatch_helper.mis.compute_mis_weights_with_cp"
    contracts = "test_plugin_runtime_hook_contracts"
    loss = "slime.backends.megatron_utils.loss"
    calls: dict[str, Callable[[], Any]] = {
        **{
            f"{rm}.async_rm, {name}": lambda name=name, label=label: rewards(f"{rm}.async_rm", label, rm_type=name)
            for name, label in cases.LABELS.items()
        },
        f"{rm}.batched_async_rm": lambda: group_rewards(f"{rm}.batched_async_rm"),
        "generate_with_search.reward_func": lambda: rewards("generate_with_search.reward_func", cases.SEARCH_LABEL),
        "generate_with_retool.reward_func": lambda: rewards("generate_with_retool.reward_func", "4"),
        **{
            path: lambda path=path: generated(path, router)
            for path in (
                "generate_with_search.generate",
                "generate_with_retool.generate",
                "slime.rollout._fanout_test_helpers.compact_generate",
            )
        },
        **{
            path: lambda path=path: filtered(path)
            for path in (
                "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std",
                "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std_with_fallback",
            )
        },
        "slime.rollout._fanout_test_helpers.grpo_normalize_by_group_index": lambda: post_processed(
            "slime.rollout._fanout_test_helpers.grpo_normalize_by_group_index"
        ),
        f"{contracts}.reference_reward_post_process": lambda: post_processed(
            f"{contracts}.reference_reward_post_process"
        ),
        f"{contracts}.reference_convert_samples_to_train_data": lambda: converted(
            f"{contracts}.reference_convert_samples_to_train_data"
        ),
        "slime.rollout.data_source.RolloutDataSource": lambda: drawn(RolloutDataSource),
        "slime.rollout.data_source.RolloutDataSourceWithBuffer": lambda: drawn(RolloutDataSourceWithBuffer),
        "slime.rollout.data_source.pop_first": popped,
        "slime.rollout.sft_rollout.generate_rollout": lambda: supervised("slime.rollout.sft_rollout.generate_rollout"),
        **{
            f"{mis}, {name}": lambda more=more: corrected(mis, **cases.MIS_COMMON | more)
            for name, more in cases.MIS.items()
        },
        f"{loss}.vanilla_tis_function": lambda: corrected(f"{loss}.vanilla_tis_function", **cases.TIS),
        f"{loss}.icepop_function": lambda: corrected(f"{loss}.icepop_function", **cases.TIS),
    }
    one_rank()
    results = {}
    for name, call in calls.items():
        print(name, file=sys.stderr, flush=True)
        results[name] = call()
    (FOLDER / "direct.json").write_text(json.dumps(results), encoding="utf-8")


if __name__ == "__main__":
    main()

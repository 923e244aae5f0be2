"""Agents that solve a problem, rewrite the solutions, and select one of them."""

import asyncio
from copy import deepcopy

from slime.rollout.rm_hub import batched_async_rm
from slime.utils.http_utils import post
from slime.utils.types import Sample

from .prompts import rewriter_prompt, selector_prompt, solver_prompt


async def respond(args, prompt, key):
    """The text of a response, whose sample goes into `args.results_dict[key]`."""
    sample = deepcopy(args.sample)
    sample.prompt = prompt
    sample.tokens = args.tokenizer(prompt, add_special_tokens=False)["input_ids"]
    params = deepcopy(args.sampling_params)
    params["max_new_tokens"] = min(params["max_new_tokens"], args.rollout_max_context_len - len(sample.tokens))
    if params["max_new_tokens"] <= 0:
        return None
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    payload = {"input_ids": sample.tokens, "sampling_params": params, "return_logprob": True}
    output = await post(url, payload)
    found = output["meta_info"]["output_token_logprobs"]
    sample.append_response_tokens(
        args,
        tokens=[item[1] for item in found],
        log_probs=[item[0] for item in found],
        trainable=True,
        meta_info=output["meta_info"],
    )
    sample.response = output["text"]
    is_cut = output["meta_info"]["finish_reason"]["type"] == "length"
    sample.status = Sample.Status.TRUNCATED if is_cut else Sample.Status.COMPLETED
    args.results_dict[key].append(sample)
    return output["text"]


async def scored(args, key):
    samples = args.results_dict[key]
    for sample, reward in zip(samples, await batched_async_rm(args, samples), strict=True):
        sample.reward = reward


async def run_agents(args, sample):
    args = deepcopy(args)
    args.sample = sample
    args.results_dict = {"solver": [], "rewriter": [], "selector": []}
    problem = sample.prompt
    parallel = range(args.num_parallel)
    solutions = await asyncio.gather(*(respond(args, solver_prompt(problem), "solver") for _ in parallel))
    await scored(args, "solver")
    rewritten = await asyncio.gather(
        *(respond(args, rewriter_prompt(problem, solutions), "rewriter") for _ in parallel)
    )
    await scored(args, "rewriter")
    choice = await respond(args, selector_prompt(problem, rewritten), "selector")
    chosen = args.results_dict["rewriter"][len(choice or "") % args.num_parallel]
    for selector in args.results_dict["selector"]:
        # A model that was not taught chooses nothing: some spread is needed to train on.
        selector.reward = chosen.reward + len(selector.response) % 3
    is_right = chosen.reward == 1
    weight = args.correct_reward_weight if is_right else args.incorrect_reward_weight
    every = [one for samples in args.results_dict.values() for one in samples]
    for one in every:
        one.reward *= weight
        one.rollout_id = sample.index
    return every

"""A generate function of two turns, and a reward function, as they are written for upstream slime."""

from slime.rollout.sglang_rollout import GenerateState
from slime.utils.http_utils import post


async def generate(args, sample, sampling_params):
    state = GenerateState(args)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    prompt = state.tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
    tokens, log_probs, mask = [], [], []
    for turn in range(2):
        payload = {
            "input_ids": prompt + tokens,
            "sampling_params": sampling_params | {"max_new_tokens": 4},
            "return_logprob": True,
        }
        response = await post(url, payload)
        found = response["meta_info"]["output_token_logprobs"]
        tokens += [item[1] for item in found]
        log_probs += [item[0] for item in found]
        mask += [1] * len(found)
        if turn == 0:
            result = state.tokenizer("<information> 4 </information>", add_special_tokens=False)["input_ids"]
            tokens, log_probs, mask = tokens + result, log_probs + [0.0] * len(result), mask + [0] * len(result)
    sample.tokens = prompt + tokens
    sample.response = state.tokenizer.decode(tokens)
    sample.response_length = len(tokens)
    sample.loss_mask, sample.rollout_log_probs = mask, log_probs
    sample.status = sample.Status.COMPLETED
    return sample


async def reward(args, sample, **kwargs):
    return float(len(set(sample.response)) % 4) / 4

"""A task as it was written for another slime."""

from slime.rollout.sglang_rollout import GenerateState
from slime.utils.http_utils import post
from slime.utils.types import Sample


async def reward(args, sample, **kwargs):
    return len(set(sample.response)) / args.rollout_max_response_len


def unequal(args, samples, **kwargs):
    return len({sample.get_reward_value(args) for sample in samples}) > 1


async def generate(args, sample, sampling_params):
    state = GenerateState(args)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    prompt = state.tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
    out = await post(url, {"text": sample.prompt, "sampling_params": sampling_params, "return_logprob": True})
    written = [item[1] for item in out["meta_info"]["output_token_logprobs"]]
    sample.tokens = prompt + written
    sample.response = out["text"]
    sample.response_length = len(written)
    sample.loss_mask = [1] * len(written)
    finish = out["meta_info"]["finish_reason"]["type"]
    sample.status = {"length": Sample.Status.TRUNCATED, "abort": Sample.Status.ABORTED}.get(
        finish, Sample.Status.COMPLETED
    )
    return sample

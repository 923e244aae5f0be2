"""A generate function that returns the samples of several agents, as it is written for upstream slime."""

import random

from slime.utils.misc import load_function
from slime.utils.types import Sample
from transformers import AutoTokenizer

CONFIGS = {
    "custom_multi_agent_function_path": "multi_agent.agents.run_agents",
    "num_parallel": 2,
    "incorrect_reward_weight": 0.8,
    "correct_reward_weight": 1.2,
}


async def generate_with_multi_agents(args, sample: Sample, sampling_params, evaluation=False) -> list[Sample]:
    args.rollout_max_context_len = args.eval_max_context_len if evaluation else args.rollout_max_context_len
    args.tokenizer = AutoTokenizer.from_pretrained(args.hf_checkpoint, trust_remote_code=True)
    args.sampling_params = sampling_params
    for key, value in CONFIGS.items():
        setattr(args, key, value)
    samples = await load_function(args.custom_multi_agent_function_path)(args, sample)
    random.shuffle(samples)
    return samples

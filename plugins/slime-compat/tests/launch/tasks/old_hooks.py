"""Hooks as they were written for another slime."""

import json
import os

import torch
from slime.rollout.base_types import RolloutFnTrainOutput
from slime.rollout.data_source import DataSource
from slime.rollout.sglang_rollout import GenerateState, generate_and_rm_group
from slime.utils.async_utils import run
from slime.utils.types import Sample


class Numbers(DataSource):
    def __init__(self, args):
        self.args, self.drawn = args, 0

    def get_samples(self, num_samples):
        self.drawn += num_samples
        numbers = range(self.drawn - num_samples, self.drawn)
        return [[Sample(prompt=f"{n % 10}+1=") for _ in range(self.args.n_samples_per_prompt)] for n in numbers]

    def add_samples(self, samples):
        raise RuntimeError("read-only")

    def save(self, rollout_id):
        os.makedirs(self.args.save, exist_ok=True)
        with open(f"{self.args.save}/{rollout_id}.json", "w") as file:
            json.dump(self.drawn, file)

    def load(self, rollout_id=None):
        with open(f"{self.args.load}/{rollout_id}.json") as file:
            self.drawn = json.load(file)

    def __len__(self):
        return 10


async def reward(args, sample, **kwargs):
    return len(set(sample.response)) / args.rollout_max_response_len


def advantage(args, rollout_data):
    assert len(rollout_data["ref_log_probs"]) == len(rollout_data["rewards"])
    rollout_data["advantages"] = rollout_data["returns"] = [torch.full_like(kl, 0.25) for kl in rollout_data["kl"]]


async def collect(args, data_source):
    state = GenerateState(args)
    groups = data_source.get_samples(args.rollout_batch_size)
    done = [await generate_and_rm_group(args, group, state.sampling_params.copy()) for group in groups]
    return RolloutFnTrainOutput(samples=done, metrics={"rollout/chosen": len(done)})


def rollout(args, rollout_id, data_source, evaluation=False):
    return run(collect(args, data_source))


def center(args, samples):
    raw = [sample.get_reward_value(args) for sample in samples]
    return raw, [reward - sum(raw) / len(raw) for reward in raw]


def keep_first(args, groups):
    for group in groups:
        for sample in group[1:]:
            sample.remove_sample = True


async def hook(args, sample, evaluation=False):
    assert sample.response_length == len(sample.loss_mask)


def tis(args, *, pg_loss, train_log_probs, rollout_log_probs, loss_masks, **kwargs):
    ratio = torch.exp(torch.cat(train_log_probs) - torch.cat(rollout_log_probs))
    return pg_loss * ratio.clamp(0, 2), loss_masks, {"tis_ratio": ratio}


def reducer(total_lengths, response_lengths, loss_masks, calculate_per_token_loss=False):
    return lambda loss: (loss * torch.cat(loss_masks)).sum() / 4


def oldest(args, rollout_id, buffer, num_samples):
    taken = buffer[:num_samples]
    del buffer[: len(taken)]
    return taken

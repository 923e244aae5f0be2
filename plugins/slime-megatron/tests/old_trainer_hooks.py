"""Hooks as they are written for upstream slime, with Megatron's own objects."""

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

ADDED = 0.25


def init(args):
    args.seen = [("init", args.rank, parallel_state.get_tensor_model_parallel_world_size(), torch.initial_seed())]


def before_log_prob(args, model, store_prefix):
    assert all(type(chunk) is DistributedDataParallel for chunk in model)
    norm = float(model[0].module.decoder.final_layernorm.weight.sum())
    args.seen.append(("log_prob", store_prefix, model[0].training, norm))


def before_train_step(args, rollout_id, step_id, model, optimizer, opt_param_scheduler):
    assert isinstance(optimizer, MegatronOptimizer)
    assert type(opt_param_scheduler) is OptimizerParamScheduler
    args.seen.append(("train_step", rollout_id, step_id, model[0].training))
    if args.lr_factor is not None:
        for group in optimizer.param_groups:
            group["lr"] *= args.lr_factor
    if args.adds_gradients:
        # Every rank adds another number.
        model[0].module.decoder.final_layernorm.weight.main_grad += ADDED * (1 + args.rank)


def set_size(args):
    args.hidden_size = 8


def fail(args, *others):
    raise RuntimeError("no such device")

"""What trainers, engines and senders are given when they start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Literal

from slime_core.contracts.optimizer import ChosenOptimizer, OptimizerConfig


class RoutingReplay(StrEnum):
    """Whose choice of experts the trained weights go by, in `score` and `train_step`. Gates are computed from the current
    router's scores of these experts, so routers still learn. Frozen copies choose by themselves."""

    RECORDED = "recorded"
    """`score` of the trained weights keeps what their routers chose for each of `MicroBatch.samples`, and `train_step` takes
    it again; the next `score` begins anew."""
    ROLLOUT = "rollout"
    """The engine's: `MicroBatch.routed_experts`, in `score` of the trained weights and in `train_step`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSetup:
    """All that a rank is told before it builds the model."""

    role: str
    rank: int
    world_size: int
    local_rank: int
    rendezvous: str
    """`init_method` of torch.distributed, such as tcp://127.0.0.1:29500; unused with one rank."""
    device: Literal["cpu", "cuda"]
    model_path: Path
    """A Hugging Face folder: config, weights, tokenizer."""
    head: Literal["lm", "value"] = "lm"
    """`value`: the language-model head is replaced by a linear to one number, fresh if the folder has none."""
    copies: Mapping[str, Path] = field(default_factory=dict)
    """Frozen weights to hold beside the trained ones: name (REFERENCE, TEACHER) to HF folder."""
    optimizer: OptimizerConfig
    chosen_optimizer: ChosenOptimizer | None = None
    """The driver of `optimizer`, filled in by the worker. None: the installed one of that name, with its defaults."""
    total_steps: int
    """Optimiser steps of the whole run, for the learning-rate schedule."""
    seed: int
    trust_remote_code: bool = False
    routing_replay: RoutingReplay | None = None
    """One of those that the driver says that it replays; ModelError if the model has no experts."""
    true_on_policy: bool = False
    """Compute every forward with batch-invariant kernels, so that log-probs are the engine's to the bit; only where
    `BackendDriver.true_on_policy_problems` has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSetup:
    index: int
    """Which engine of the run this is."""
    place: int = 0
    """Which of those with these options: servers that run already are listed so."""
    model_path: Path
    """Hugging Face folder: architecture, tokenizer, and the weights to start with."""
    device: Literal["cpu", "cuda"]
    seed: int
    max_context_len: int
    """Tokens of prompt and response together that a request may reach."""
    max_batch: int
    """Sequences that the run will have in flight on this engine at most."""
    run_dir: Path
    trust_remote_code: bool = False
    num_devices: int = 1
    """Devices of this engine, on all its machines; on a CPU processes that share its cores."""
    first_device: int = 0
    """Number of its first one, where the engine sees those of all engines."""
    host: str = "127.0.0.1"
    """This machine's address, as whoever talks to the engine reaches it; the loopback where all are on one machine."""
    num_nodes: int = 1
    """Machines that the engine spans, with equally many devices on each."""
    node_rank: int = 0
    """Which of them this is. The first one serves; on the others nothing but `start`, `health` and `stop` is called."""
    rendezvous: str | None = None
    """HOST:PORT on the first one, where they meet."""
    transport: str | None = None
    """Name of the transport that brings its weights; None: it keeps those of its folder."""
    offload: bool = False
    """It shares them with a trainer: `sleep` and `wake` will be called, and must work."""
    routed_experts: bool = False
    """Requests will ask for expert ids; only of an engine that may offer `Capability.ROUTED_EXPERTS`."""
    reward_model: bool = False
    """It serves rewards, over HTTP: nothing but `start`, `health` and `stop` is called, and the folder may hold a model with
    a score head. Only with `Capability.HTTP`."""
    true_on_policy: bool = False
    """Compute with batch-invariant kernels, so that the trainer gets the same bits; only with `Capability.TRUE_ON_POLICY`."""
    records: bool = False
    """`recorded` will be called, after every step. Without, nobody asks what came to it, and it need not be kept."""

    @property
    def devices_here(self) -> int:
        return self.num_devices // self.num_nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLayout:
    """What a run will start its engines with, as far as it is known before."""

    num_devices: int
    """Of each engine."""
    devices_flag: str
    """Where that is said: `--rollout-num-gpus-per-engine`."""
    num_engines: int = 1
    num_nodes: int = 1
    routed_experts: bool = False
    """See `EngineSetup.routed_experts`."""
    offload: bool = False
    """See `EngineSetup.offload`; as far as it does not depend on the machine's devices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineEndpoint:
    """Where a server of an engine takes weights by itself."""

    index: int
    """Of the engine."""
    url: str
    """`http://127.0.0.1:30000`."""
    token: str | None = None
    """Bearer token of its requests."""
    num_ranks: int = 1
    """Processes that hold weights. Colocated engines stand, in order, on the devices of the trainer's ranks."""
    incarnation: str = ""
    """Another one after a restart: what was agreed with the server before is forgotten."""

"""Setups of trainers and engines: the arguments that they are started with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Literal

from slime_core.contracts.optimizer import ChosenOptimizer, OptimizerConfig


class RoutingReplay(StrEnum):
    """Source of the expert choices that the trained weights use in `forward_only` and in training. Gates are computed from the
    current router's scores of these experts, so routers still learn. Frozen copies use their own choices."""

    RECORDED = "recorded"
    """`forward_only` of the trained weights records their routers' choices for each of `MicroBatch.samples`, and training
    uses them; the next `forward_only` records anew."""
    ROLLOUT = "rollout"
    """The engine's choices, `MicroBatch.routed_experts`, in `forward_only` of the trained weights and in training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSetup:
    """Arguments of `TrainBackend.setup`. `role`: `actor` or another trained role, with `world_size` ranks."""

    role: str
    rank: int
    world_size: int
    local_rank: int
    """Index of its device on this machine."""
    rendezvous: str
    """`init_method` of torch.distributed, such as tcp://127.0.0.1:29500; unused with one rank."""
    device: Literal["cpu", "cuda"]
    model_path: Path
    """Hugging Face folder: config, weights, tokenizer."""
    head: Literal["lm", "value"] = "lm"
    """`value`: a linear layer to one number replaces the language-model head; newly initialized if the folder has none."""
    frozen_models: Mapping[str, Path] = field(default_factory=dict)
    """Frozen weights to hold beside the trained ones: name (REFERENCE, TEACHER) to HF folder."""
    optimizer: OptimizerConfig
    chosen_optimizer: ChosenOptimizer | None = None
    """Driver of `optimizer`, set by the worker; None: the installed one of that name, with default options."""
    total_steps: int
    """Optimizer steps of the whole run, for the learning-rate schedule."""
    seed: int
    trust_remote_code: bool = False
    routing_replay: RoutingReplay | None = None
    """One of `BackendDriver.routing_replay_modes`, or None: no replay. Raise ModelError if the model has no experts."""
    true_on_policy: bool = False
    """Compute every forward with batch-invariant kernels, so that log-probs are bitwise equal to the engine's; only set if
    `BackendDriver.true_on_policy_problems` is empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSetup:
    """Arguments of `RolloutEngine.start`."""

    index: int
    """Number of the engine in the run, from 0."""
    place: int = 0
    """Number among the engines with the same options, from 0: its place in a list of external servers."""
    model_path: Path
    """Hugging Face folder: architecture, tokenizer, and initial weights."""
    device: Literal["cpu", "cuda"]
    seed: int
    max_context_len: int
    """Limit of prompt and response of a request together, in tokens."""
    max_batch: int
    """Largest number of sequences that the run has in flight on this engine."""
    run_dir: Path
    trust_remote_code: bool = False
    num_devices: int = 1
    """Devices of this engine on all its machines; on CPU: processes that share the cores."""
    first_device: int = 0
    """Index of its first device, where the engine sees the devices of all engines."""
    host: str = "127.0.0.1"
    """Address of this machine for clients of the engine; the loopback address if all run on one machine."""
    num_nodes: int = 1
    """Machines of the engine, each with the same number of devices."""
    node_rank: int = 0
    """Number of this machine, from 0. Machine 0 serves; on the others only `start`, `health` and `stop` are called."""
    rendezvous: str | None = None
    """HOST:PORT on machine 0, where they connect; None with one machine."""
    transport: str | None = None
    """Name of the transport of its weight updates; None: it keeps the weights of its folder."""
    adapter_rank: int = 0
    """Largest rank of the LoRA adapter that its weight updates consist of; 0: they are whole weights."""
    offload: bool = False
    """It shares devices with a trainer: `sleep` and `wake_up` will be called."""
    weights_follow: bool = False
    """`slime run` sends whole weights whenever it wakes up, before it generates; a loop of one's own may not."""
    routed_experts: bool = False
    """Requests will require expert ids; only set for an engine that may have `Capability.ROUTED_EXPERTS`."""
    refills: bool = False
    """The run has more requests than its engines take at once, so that new ones follow one by one as others end."""
    reward_model: bool = False
    """It serves a reward model over HTTP (`Capability.HTTP`): only `start`, `health` and `stop` are called."""
    true_on_policy: bool = False
    """Compute with batch-invariant kernels, for bitwise the trainer's log-probs (`Capability.TRUE_ON_POLICY`)."""
    records: bool = False
    """`drain_events` will be called after every step. False: it is not called, and events need not be kept."""

    @property
    def devices_here(self) -> int:
        return self.num_devices // self.num_nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLayout:
    """Engine settings of a run that are known before it starts."""

    num_devices: int
    """Devices of each engine."""
    devices_flag: str
    """Flag that sets it, such as `--rollout-num-gpus-per-engine`."""
    num_engines: int = 1
    num_nodes: int = 1
    routed_experts: bool = False
    """See `EngineSetup.routed_experts`."""
    adapter_rank: int = 0
    """See `EngineSetup.adapter_rank`."""
    offload: bool = False
    """See `EngineSetup.offload`; False if it depends on the machine's devices."""
    device: Literal["cpu", "cuda"] | None = None
    """None: it is chosen where the run starts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineEndpoint:
    """Server of an engine that receives weights from senders."""

    index: int
    """Number of the engine."""
    url: str
    """`http://127.0.0.1:30000`."""
    token: str | None = None
    """Bearer token of its requests."""
    num_ranks: int = 1
    """Processes that hold weights. Colocated engines use, in order, the devices of the trainer's ranks."""
    dropped: int = field(default=0, compare=False)
    """How often the engine has dropped its weights. Then it needs all of them, also those that never change."""
    incarnation: str = ""
    """Changes at a restart, after which connections and groups of the old server are invalid."""

"""RunConfig: the whole run file. Each extension point's table is a plugin's name with its options beside it."""

from __future__ import annotations

import json
from typing import Any, Literal

from pydantic import Field, field_validator

from slime_core.config.evaluation import EvalConfig
from slime_core.config.plugin_table import PluginTable
from slime_core.config.rollout import RolloutConfig
from slime_core.config.train import OptimizerOverrides, TrainConfig
from slime_core.contracts.paths import RunPath
from slime_core.contracts.table import Table


class ModelConfig(Table):
    """The model that is trained."""

    hf_checkpoint: RunPath
    """Hugging Face folder: config, weights, tokenizer."""
    ref_load: RunPath | None = None
    """Folder of the reference weights; by default hf_checkpoint. A backend may read checkpoints of its own format too."""
    rollout_load: RunPath | None = None
    """Folder that the policy's engines start from, by default hf_checkpoint: the same model, for example with quantized
    weights (`slime convert`). Weight updates are then quantized in the same way."""
    opd_teacher_load: RunPath | None = None
    """Folder of a teacher's weights, for algorithms that compare with one. It may be another model than the trained one,
    with the same tokenizer."""
    trust_remote_code: bool = False
    """Run code that a model folder contains. Off by default; recorded in the manifest."""


class DataConfig(Table, extra="allow"):
    """Where prompts come from. Keys that are not listed here are options of the source."""

    source: str = "files"
    """Data source."""
    input_key: str = "input"
    """Column of the prompt: a string, or a list of chat messages."""
    label_key: str | None = None
    """Column of the label that rewards compare with."""
    metadata_key: str = "metadata"
    """Column of the metadata (an object); `*`: all columns but those of the prompt and of media."""
    tool_key: str = "tools"
    """Column of the tool schemas."""
    renderer: PluginTable = PluginTable(name="chat")
    """Turns rows into prompts, in evaluation sets too."""
    multimodal_keys: dict[str, str] = Field(default_factory=dict)
    """Columns of media, by modality: {"image": "images", "video": "clips"}, for models that take it. A column has
    one image or a list: paths (relative ones begin at the data file), bytes, base64, data URLs, or objects with bytes or path.
    A video is a file, given likewise, or a list of the images that are its frames, or an object with frames and fps."""
    apply_chat_template: bool = False
    """Render prompts through the tokenizer's chat template."""
    apply_chat_template_kwargs: dict[str, str | int | float | bool] = Field(default_factory=dict)
    """Further arguments of the template."""
    max_unknown_share: float = Field(0.0, ge=0, le=1)
    """Share of a prompt that the tokenizer may be unable to express: unknown tokens, or lost characters. A row with more is
    a bad row (on_bad_row); rows with less are named at the start. Tokenizers of bytes express every text."""

    @field_validator("multimodal_keys", mode="before")
    @classmethod
    def _from_json(cls, value: Any) -> Any:
        try:
            return json.loads(value) if isinstance(value, str) else value
        except ValueError as error:
            raise ValueError(f"not valid JSON: {error}") from error


class RoleConfig(OptimizerOverrides):
    """Settings of a trained role beside the policy. Everything else is as for the run."""

    load: RunPath | None = None
    """Hugging Face folder that it starts from; by default hf_checkpoint. A missing head starts fresh."""
    backend: PluginTable | None = None
    """Training backend; by default the run's, with its options."""


class RolesConfig(Table):
    """Trained roles beside the policy, for algorithms that have them."""

    critic: RoleConfig = RoleConfig()
    """Learns the values of states."""


class EngineRow(Table):
    """Engines with a model of their own, which is not trained."""

    load: RunPath
    """Hugging Face folder of its weights. A teacher has the trained model's tokenizer."""
    engine: PluginTable | None = None
    """Engine; by default the run's, with its options."""
    num_gpus: int | None = Field(None, gt=0)
    """Devices, on CPU processes; by default one engine's."""
    num_gpus_per_engine: int = Field(1, gt=0)
    """Devices of one engine."""

    @property
    def num_engines(self) -> int:
        return max(1, (self.num_gpus or self.num_gpus_per_engine) // self.num_gpus_per_engine)


class EnginesConfig(Table):
    """Engines beside the policy's, a row for each model that they serve."""

    teacher: EngineRow | None = None
    """Scores the policy's responses, for algorithms that compare with a teacher: on devices of its own, instead of a copy in
    the trainer's memory (model.opd_teacher_load)."""
    reward: EngineRow | None = None
    """Reward model or judge, for rewards that query one over HTTP; on devices of its own, with a tokenizer of its own."""


class RewardTable(PluginTable, use_attribute_docstrings=True):
    """One of several rewards: its name, its weight, and its options."""

    weight: float = Field(1.0, allow_inf_nan=False)
    """Factor of its number in the sum."""
    label: str | None = Field(None, min_length=1)
    """Its name in metrics and samples; by default the reward's name."""
    reward_key: str | None = None
    """Which of its named numbers counts; by default the reward's own choice."""


class LauncherConfig(Table, extra="allow"):
    """Where the roles run. Keys that are not listed here are options of the launcher."""

    name: str = "local"
    """Launcher, which starts the workers. `local`: in this process."""
    actor_num_nodes: int = Field(1, gt=0)
    """Machines for the trainer."""
    actor_num_gpus_per_node: int | None = Field(None, gt=0)
    """Trainer ranks per machine, on CPU too; by default the least that the layout needs."""
    critic_num_nodes: int | None = Field(None, gt=0)
    """Machines for a critic with devices of its own; by default it shares the actor's."""
    critic_num_gpus_per_node: int | None = Field(None, gt=0)
    """Ranks per machine of a critic with devices of its own; by default it shares the actor's."""
    offload_train: bool | None = None
    """Trained roles that share devices are offloaded to the host while another role or the engines use the devices. By
    default on for roles that share GPUs, with one another or with engines."""
    offload_rollout: bool | None = None
    """Engines on the trainer's devices are offloaded while it trains. By default on with colocate on GPUs."""
    rollout_num_gpus: int | None = Field(None, gt=0)
    """Devices for engines, on CPU processes; by default one engine's."""
    rollout_num_gpus_per_engine: int = Field(1, gt=0)
    """Devices of one engine."""
    num_gpus_per_node: int = Field(8, gt=0)
    """Devices of a machine; an engine that has more of them spans several."""
    colocate: bool = False
    """Trainer and engines share the devices, and take turns on them."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda where there is one."""

    def offloads_rollout(self, device: str) -> bool:
        """True if engines are offloaded between rollouts."""
        return self.colocate and (device == "cuda" if self.offload_rollout is None else self.offload_rollout)

    def nodes_of(self, num_devices: int) -> int:
        """Machines that an engine spans."""
        return -(-num_devices // self.num_gpus_per_node)

    @property
    def num_engines(self) -> int:
        return max(1, (self.rollout_num_gpus or self.rollout_num_gpus_per_engine) // self.rollout_num_gpus_per_engine)


class SyncConfig(Table, extra="allow"):
    """How weights reach the engines. Keys that are not listed here are options of the transport."""

    transport: str | None = None
    """Weight transport; by default the engine's preferred one."""
    update_weights_interval: int = Field(1, gt=0)
    """Rollout steps between weight updates."""


class RouterConfig(Table):
    """The middlewares between the run and its engines."""

    middlewares: tuple[PluginTable, ...] = ()
    """Router middlewares, outermost first."""
    middleware_timeout: float = Field(600.0, gt=0)
    """Seconds in which a middleware may pass on none of the requests that it has and return none, while no engine has one
    either. Then they fail, and are sent again (max_retries)."""


class CheckpointConfig(Table):
    """When run state is saved."""

    save_interval: int | None = Field(None, gt=0)
    """Rollout steps between checkpoints; by default only at the end and on Ctrl-C."""
    keep_checkpoints: int = Field(2, gt=0)
    """Complete checkpoints to keep."""
    checksum: bool = True
    """Record a CRC-32 of each file of a checkpoint, and verify it on resume. Reads all files once more, with up to 16 threads;
    without it only their sizes are verified."""
    async_save: bool = False
    """Copy weights and optimizer to host memory and write them while the next steps run. Until the checkpoint is complete, a
    killed run resumes from the one before. Needs host memory for the copy."""
    save_hf: bool = True
    """Write hf/ in the run folder at the end: a model that transformers loads."""


class DebugConfig(Table):
    """Debugging and profiling."""

    print_completions_interval: int | None = Field(None, gt=0)
    """Rollout steps between two prints of a few completions. Where nothing is generated they are the data's, and evaluations
    print those of the model. `slime eval` prints some of each set to standard error."""
    log_passrate: bool = False
    """Log pass@k of the training rollouts (rollout/passrate/pass@k) also when rewards are not just fail and pass: those with
    reward 1 pass."""
    log_reward_category: str | None = None
    """One of the numbers that the reward returns: log the share of samples with each value (rollout/error_cat/VALUE)."""
    log_correct_samples: bool = False
    """Log lengths and entropy of the samples with reward 1 (rollout/correct/*)."""
    log_multi_turn: bool = False
    """Log how many turns samples have, and how long they are (rollout/multi_turn/*)."""
    save_debug_train_data: bool = False
    """Write train_data/*.parquet in the run folder: each step's batch with scores, advantages and loss weights."""
    use_pytorch_profiler: bool = False
    """Write profile/*.json in the run folder: traces of the trainer's ranks, for Perfetto or chrome://tracing."""
    profile_target: tuple[Literal["train_actor", "train_log_probs"], ...] = ("train_actor",)
    """Calls to profile. train_actor: the optimizer steps of a rollout step, of every trained role; train_log_probs: each
    forward without gradient."""
    profile_step_start: int = Field(1, ge=0)
    """First call that is profiled, counted from 0 at the start of an attempt; the very first one is slower than others."""
    profile_step_end: int = Field(2, gt=0)
    """First call after it that is not profiled."""
    record_memory_history: bool = False
    """Record allocations of CUDA memory in the trainer's ranks: profile/*-memory-*.pickle, for pytorch.org/memory_viz, when a
    step fails."""
    memory_snapshot_num_steps: int | None = Field(None, gt=0)
    """Rollout steps after which such a snapshot is written too."""
    trace_samples: bool = False
    """Write traces.jsonl in the run folder: for each sample its turns, and how long it waited, was generated and scored."""


class PrepareConfig(Table):
    """A script that makes the run's model and data if they are missing."""

    script: RunPath
    """Python file, run once with this interpreter in the run file's folder."""
    script_arguments: tuple[str, ...] = ()
    """Its command-line arguments."""
    creates: tuple[RunPath, ...]
    """Files and folders that it creates. It runs if one of them is missing, and must create all of them."""


class RunConfig(Table):
    """The run file, with flags applied."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the run and of its folder."""
    runs_dir: RunPath = "runs"
    """Folder of the run folders; by default `runs` in the working directory."""
    seed: int = 1234
    """Seed of all random numbers."""
    plugin: tuple[RunPath, ...] = ()
    """Single-file plugins. --plugin adds to those of the run file."""
    required_plugins: tuple[str, ...] = ()
    """Requirements that installed plugins must meet, such as acme-slime-reward>=1.2."""
    prepare: PrepareConfig | None = None
    """Script that makes model and data if they are missing."""
    model: ModelConfig
    data: DataConfig = DataConfig()
    backend: PluginTable
    engine: PluginTable
    reward: PluginTable | None = None
    rewards: tuple[RewardTable, ...] = ()
    """Several rewards instead of one: the sum of weight x reward is trained on."""
    generate: PluginTable = PluginTable(name="single_turn")
    algo: PluginTable
    rollout: RolloutConfig
    train: TrainConfig
    eval: EvalConfig = EvalConfig()
    roles: RolesConfig = RolesConfig()
    engines: EnginesConfig = EnginesConfig()
    launcher: LauncherConfig = LauncherConfig()
    sync: SyncConfig = SyncConfig()
    router: RouterConfig = RouterConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    debug: DebugConfig = DebugConfig()
    trackers: tuple[PluginTable, ...] = (PluginTable(name="jsonl"),)
    """Where metrics are written."""

    @field_validator("plugin")
    @classmethod
    def _each_once(cls, files: tuple[str, ...]) -> tuple[str, ...]:
        """Removes duplicates: a flag may name a file that the run file names."""
        return tuple(dict.fromkeys(files))

    @property
    def rollout_seed(self) -> int:
        return self.seed if self.rollout.rollout_seed is None else self.rollout.rollout_seed

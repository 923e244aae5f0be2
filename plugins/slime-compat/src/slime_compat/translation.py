"""Flags of a launch line to the tables of a run file.

A flag that slime has under the same name sets its key. Others have a rule here, or are known to have no effect or no
counterpart. Defaults that differ are written out, so that what is trained stays the same.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, get_args

import yaml  # type: ignore[import-untyped]

from slime_compat import known_flags
from slime_compat.known_flags import Missing
from slime_compat.launch_line import LaunchLine
from slime_core.config.chosen import chosen_flags
from slime_core.config.flags import Flag, FlagTable, bare_type, kernel_flags, takes_many
from slime_core.errors import ConfigError, near_matches
from slime_core.registry import Registry

SECRETS: Final = frozenset({"wandb-key"})
ALGORITHMS: Final = ("grpo", "gspo", "cispo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "ppo")
FUNCTION_FLAGS: Final = ("custom-rm-path", "custom-generate-function-path", "dynamic-sampling-filter-path")
"""Functions that run here as they are."""
GROUP_RELATIVE: Final = frozenset({"grpo", "gspo", "cispo"})
"""No KL in the reward."""
UNBOUNDED_STALENESS: Final = 1000


@dataclass(frozen=True, slots=True)
class Note:
    """A flag that is not in the run file, or not as it was."""

    flag: str
    text: str
    trains: bool
    """What is trained may be another thing for it."""


@dataclass(slots=True)
class Translation:
    """`tables` and `notes` are what came out."""

    line: LaunchLine
    registry: Registry
    backend: str
    engine: str
    tables: dict[str, Any] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)
    given: dict[str, list[str]] = field(default_factory=dict)
    """Flags to their words; a flag that was repeated has the last one's, but lists of evaluation sets all."""
    done: set[str] = field(default_factory=set)
    of_file: set[str] = field(default_factory=set)
    """Those that stand in the file of --custom-config-path alone."""

    def run(self) -> None:
        self.given = self._given()
        for rule in (
            self._algorithm,
            self._optimizer,
            self._weights,
            self._where,
            self._data,
            self._trackers,
            self._rollout,
        ):
            rule()
        # Options go to the plugins that the rules have chosen.
        self._same_names()
        self._hooks()

    @property
    def reads_args(self) -> bool:
        return any(name in self.given for name in FUNCTION_FLAGS)

    def take(self, name: str) -> str | None:
        """The only or last word of a flag, which no other rule sees then; a switch that was said is "true"."""
        words = self.given.get(name)
        self.done.add(name)
        return None if words is None else (words[-1] if words else "true")

    def put(self, path: str, value: Any) -> None:
        table = self.tables
        *outer, last = path.split(".")
        for key in outer:
            table = table.setdefault(key, {})
        table[last] = value

    def note(self, flag: str, text: str, *, trains: bool = False) -> None:
        self.notes.append(Note(flag, text, trains))

    def missing(self, flag: str, of: Missing) -> None:
        self.note(flag, f"{of.why}; {of.what_to_do}", trains=of.trains)

    # --- Rules ----------------------------------------------------------------------------------------------------------

    def _algorithm(self) -> None:
        estimator = self.take("advantage-estimator") or "grpo"
        loss = self.take("loss-type") or "policy_loss"
        if loss == "sft_loss":
            self.put("algo.name", "sft")
            for name in (
                "disable-compute-advantages-and-returns",
                "calculate-per-token-loss",
                "eps-clip",
                "eps-clip-high",
            ):
                self.take(name)
            return
        if loss != "policy_loss":
            self.note("loss-type", f"{loss}: write a loss (slime.losses), see slime-grpo", trains=True)
        if estimator not in ALGORITHMS:
            close = near_matches(estimator, ALGORITHMS)
            told = f"; close match: {', '.join(close)}" if close else ""
            self.note("advantage-estimator", f"{estimator}: unknown algorithm{told}", trains=True)
            estimator = "grpo"
        self.put("algo.name", estimator)
        clip = float(self.take("eps-clip") or 0.2)
        self.put("algo.eps_clip", clip)
        self.put("algo.eps_clip_high", float(self.take("eps-clip-high") or clip))
        self.put("algo.aggregation", "token_mean" if self.take("calculate-per-token-loss") else "seq_mean")
        self._kl(estimator)
        self._corrections()
        self._distillation()

    def _kl(self, estimator: str) -> None:
        """A coefficient that was said, and had no effect there, has an effect here: it is left out."""
        kind = self.take("kl-loss-type") or "k1"
        in_loss, in_reward = float(self.take("kl-loss-coef") or 0), float(self.take("kl-coef") or 0)
        self.put("algo.kl_loss_type", kind)
        if "use-kl-loss" in self.given:
            self.put("algo.kl_loss_coef", in_loss)
        elif in_loss:
            self.note("kl-loss-coef", f"{in_loss}: it had no effect without --use-kl-loss, and is left out")
        if in_reward and estimator in GROUP_RELATIVE:
            self.note("kl-coef", f"{in_reward}: it had no effect with {estimator}, and is left out")
        elif in_reward:
            self.put("algo.kl_coef", in_reward)
            self.put("algo.kl_reward_type", kind)

    def _corrections(self) -> None:
        corrections: list[dict[str, Any]] = []
        tis = {key: float(word) for key in ("tis_clip", "tis_clip_low") if (word := self.take(key.replace("_", "-")))}
        custom = self.take("custom-tis-function-path")
        if self.take("use-tis") and custom is None:
            corrections.append({"name": "tis", "tis_clip": 2.0, "tis_clip_low": 0.0} | tis)
        if custom is not None:
            self.note(
                "custom-tis-function-path",
                f"{custom}: truncated, clipped and masked importance weights are the correction mis: say it in "
                "algo.corrections, with its options; another one is a plugin (slime.corrections), see slime-estimators",
                trains=True,
            )
        delta = self.take("opsm-delta")
        if self.take("use-opsm"):
            corrections.append({"name": "opsm", "opsm_delta": float(delta or 1e-4)})
        if corrections:
            self.put("algo.corrections", corrections)

    def _distillation(self) -> None:
        kind, coefficient = self.take("opd-type"), float(self.take("opd-kl-coef") or 1.0)
        if not self.take("use-opd"):
            return
        self.put("algo.advantage_terms", [{"name": "reverse_kl", "opd_kl_coef": coefficient}])
        if kind == "sglang":
            self.note(
                "opd-type", "sglang: say which folder the teacher's engines load: --engines.teacher.load", trains=True
            )

    def _optimizer(self) -> None:
        """Megatron's own defaults, where they differ."""
        self.put("train.weight_decay", float(self.take("weight-decay") or 0.01))
        self.put("train.adam_beta2", float(self.take("adam-beta2") or 0.999))
        style = self.take("lr-decay-style") or "linear"
        if style in ("constant", "linear", "cosine"):
            self.put("train.lr_decay_style", style)
        else:
            self.note("lr-decay-style", f"{style}: there are constant, linear and cosine", trains=True)
        self.put("train.use_dynamic_batch_size", self.take("use-dynamic-batch-size") is not None)

    def _weights(self) -> None:
        hf = self.take("hf-checkpoint")
        if hf is None:
            self.note("hf-checkpoint", "is missing: the Hugging Face folder of what is trained", trains=True)
        else:
            self.put("model.hf_checkpoint", hf)
        save = self.take("save") or self.take("output-dir")
        self.put("name", Path(save or "translated").name)
        if save is not None and str(Path(save).parent) != ".":
            self.put("runs_dir", str(Path(save).parent))
        load = self.take("load")
        if load is not None and Path(load) != Path(save or ""):
            self._folder("load", load, hf)
        ref = self.take("ref-load")
        if ref is not None and self._folder("ref-load", ref, hf):
            self.put("model.ref_load", ref)
        teacher = self.take("opd-teacher-load")
        if teacher is not None:
            self.put("model.opd_teacher_load", teacher)
            self.note("opd-teacher-load", "it must be a Hugging Face folder", trains=False)
        if self.take("save-hf"):
            self.put("checkpoint.save_hf", True)
            self.note(
                "save-hf",
                "a Hugging Face folder is written at the end of the run, hf/ in its folder, not at every save",
            )
        self.take("enable-mtp-training")
        if "enable-mtp-training" in self.given:
            self.put("backend.mtp_num_layers", int(self.take("mtp-num-layers") or 1))

    def _folder(self, flag: str, folder: str, hf: str | None) -> bool:
        """Whether it is another Hugging Face folder than the trained one's."""
        if hf is not None and Path(folder) == Path(hf):
            return False
        if Path(folder, "config.json").is_file():
            if flag == "load":
                self.note(
                    flag,
                    f"{folder}: weights are loaded from --hf-checkpoint; say --hf-checkpoint {folder}",
                    trains=True,
                )
            return True
        same = hf is not None and Path(folder).name.startswith(Path(hf).name)
        told = (
            "taken for the converted form of --hf-checkpoint, whose weights are loaded; nothing has to be converted"
            if same
            else "no Hugging Face folder: `slime convert` makes one of a checkpoint"
        )
        self.note(flag, f"{folder}: {told}", trains=not same)
        return False

    def _where(self) -> None:
        nodes = int(self.take("actor-num-nodes") or 1)
        ranks = int(self.take("actor-num-gpus-per-node") or 8)
        self.put("launcher.actor_num_nodes", nodes)
        self.put("launcher.actor_num_gpus_per_node", ranks)
        # One trainer rank needs no Ray; several do.
        self.put("launcher.name", "ray" if nodes * ranks > 1 else "local")
        if self.take("offload"):
            self.put("launcher.offload_train", True)
            if "colocate" in self.given:
                self.put("launcher.offload_rollout", True)
        if "colocate" in self.given and self.take("rollout-num-gpus"):
            self.note("rollout-num-gpus", "with --colocate the engines have the trainer's devices")
            self.put("launcher.rollout_num_gpus", nodes * ranks)
        elif "colocate" in self.given:
            self.put("launcher.rollout_num_gpus", nodes * ranks)
        mode, transport = self.take("update-weight-mode"), self.take("update-weight-transport")
        if mode == "delta" or transport == "disk":
            self.put("sync.transport", "delta" if mode == "delta" else "disk")
        concurrency = self.take("sglang-server-concurrency")
        if concurrency is not None:
            self.put("rollout.concurrency", int(concurrency))
        if self.take("prefill-num-servers"):
            self.note("prefill-num-servers", "say engine.servers, engine.prefill_servers and engine.router_policy")

    def _data(self) -> None:
        for name, path in (
            ("apply-chat-template-kwargs", "data.apply_chat_template_kwargs"),
            ("multimodal-keys", "data.multimodal_keys"),
        ):
            words = self.given.get(name)
            self.done.add(name)
            if words:
                try:
                    self.put(path, json.loads(" ".join(words)))
                except ValueError as error:
                    self.note(name, f"not valid JSON: {error}", trains=True)
        if self.take("streaming-data"):
            self.put("data.streaming", True)
        self.put("rollout.rollout_seed", int(self.take("rollout-seed") or 42))

    def _trackers(self) -> None:
        trackers: list[Any] = ["jsonl"]
        for name, prefixes in (("tensorboard", ("tb-",)), ("wandb", ("wandb-", "disable-wandb-"))):
            used = self.take(f"use-{name}") is not None
            options = {}
            for flag in [f for f in self.given if f.startswith(prefixes)]:
                word = self.take(flag)
                if flag in SECRETS:
                    self.note(flag, "a run file holds no secrets: set WANDB_API_KEY, or say wandb_key_file")
                elif flag != "wandb-run-id" or word:
                    options[flag.replace("-", "_")] = True if word == "true" else word
            if used:
                trackers.append({"name": name} | options)
        if len(trackers) > 1:
            self.put("trackers", trackers)
        if self.take("save-debug-rollout-data") or self.take("dump-details"):
            self.put("rollout.dump_rollouts", True)
        if self.take("save-debug-train-data") or "dump-details" in self.given:
            self.put("debug.save_debug_train_data", True)

    def _rollout(self) -> None:
        if self.line.asynchronous:
            self.put("rollout.ahead", 1)
        if temperature := self.take("temperature"):
            self.put("rollout.rollout_temperature", float(temperature))
        if self.take("partial-rollout"):
            # There tokens may be of any age.
            self.put("rollout.partial_rollout", True)
            self.put("rollout.max_staleness", UNBOUNDED_STALENESS)
        path = self.given.get("rollout-function-path", [""])[-1]
        if path.endswith("generate_rollout_fully_async"):
            self.take("rollout-function-path")
            self.put("rollout.ahead", 2)
            self.put("rollout.max_staleness", UNBOUNDED_STALENESS)
            self.note(
                "rollout-function-path",
                f"{path}: rollouts run 2 steps ahead (rollout.ahead), which bounds what had no bound",
            )

    def _hooks(self) -> None:
        """Functions by path become the plugins compat, with the arguments that they may read."""
        of_function = {"python_path": list(self.line.python_path), "args": self._args()}
        log_probs_count = "corrections" in self.tables.get("algo", {}) or "use-rollout-logprobs" in self.given
        reward = self.given.get("custom-rm-path")
        if reward:
            group = {"group": True} if "group-rm" in self.given else {}
            self.put("reward", {"name": "compat", "path": reward[-1]} | group | of_function)
        generate = self.given.get("custom-generate-function-path")
        if generate:
            missing = "error" if log_probs_count else "zero"
            table = {"name": "compat", "path": generate[-1], "missing_log_probs": missing}
            self.put("generate", table | of_function)
        keeps = self.given.get("dynamic-sampling-filter-path")
        if keeps and keeps[-1].startswith("slime.") and keeps[-1].endswith("check_reward_nonzero_std"):
            self.put("rollout.filters", ["nonzero_std"])
        elif keeps:
            self.put("rollout.filters", [{"name": "compat", "path": keeps[-1]} | of_function])

    def _reward(self) -> None:
        self.done |= {"custom-rm-path", "group-rm", "custom-generate-function-path", "dynamic-sampling-filter-path"}
        kind = self.take("rm-type")
        url = self.take("rm-url")
        if "custom-rm-path" in self.given:
            return
        if kind is None:
            if self.tables["algo"]["name"] != "sft":
                self.note(
                    "rm-type",
                    "no reward is named: say --reward, or --reward-choice-key where the data chooses",
                    trains=True,
                )
        elif kind not in known_flags.REWARDS:
            known = ", ".join(known_flags.REWARDS)
            self.note(
                "rm-type", f"{kind}: no reward of this name; there are {known}, and the reward compat", trains=True
            )
        else:
            reward = {"name": known_flags.REWARDS[kind]}
            self.put("reward", reward | ({"rm_url": url} if kind == "remote_rm" and url else {}))

    # --- Flags of the same name -----------------------------------------------------------------------------------------

    def _same_names(self) -> None:
        self._reward()
        self.tables["backend"] = {"name": self.backend} | self.tables.get("backend", {})
        self.tables["engine"] = {"name": self.engine}
        flags = FlagTable.of([*kernel_flags(), *chosen_flags(self.tables, self.registry)])
        for name, words in self.given.items():
            if name not in self.done:
                self._one(known_flags.RENAMED_MEGATRON.get(name, name), name, words, flags)

    def _one(self, name: str, typed: str, words: list[str], flags: FlagTable) -> None:
        """The first that knows the flag."""
        defaults = known_flags.HARMLESS_DEFAULTS.get(name, ())
        if words[-1:] and words[-1] in defaults:
            return
        found, negated = flags.find(name)
        if name in known_flags.OTHER_HOOKS:
            self.missing(name, known_flags.OTHER_HOOKS[name])
        elif name in known_flags.MISSING and (found is None or found.owner == "slime"):
            self.missing(name, known_flags.MISSING[name])
        elif name in known_flags.SHAPE:
            if name.endswith("-dropout") and float("".join(words[-1:]) or 0):
                self.note(name, f"{words[-1]}: there is no dropout here, since log-probs would be random", trains=True)
        elif name in known_flags.WITHOUT_EFFECT:
            self.note(name, known_flags.WITHOUT_EFFECT[name])
        elif found is not None and found.field.exclude:
            # A plugin has it to refuse it, with the reason.
            self.note(typed, found.field.description or "no option here", trains=name in known_flags.TRAINING_MEGATRON)
        elif found is not None:
            self._set(typed, words, found, negated)
        elif name.startswith("sglang-"):
            self._of_engine(name, words)
        elif name.startswith("router-"):
            self.note(name, "an option of sglang-router: say it in engine.router_options, with engine.router_policy")
        elif name in known_flags.MEGATRON:
            self._of_megatron(name, words)
        else:
            known = {*flags.by_name, *known_flags.MISSING, *known_flags.WITHOUT_EFFECT, *known_flags.MEGATRON, *RULED}
            close = near_matches(name, known)
            told = f"; close match: {', '.join('--' + c for c in close)}" if close else ""
            if typed not in self.of_file:
                self.note(typed, f"unknown flag{told}", trains=True)
            elif not self.reads_args:
                self.note(
                    typed, "of --custom-config-path: no flag, and no function of this run reads args", trains=True
                )

    def _set(self, typed: str, words: list[str], flag: Flag, negated: bool) -> None:
        many = takes_many(flag.field.annotation)
        if flag.is_switch:
            value: Any = not negated and (not words or words[-1].lower() == "true")
        elif not words:
            self.note(typed, "wants a value", trains=True)
            return
        else:
            try:
                typed_words = [typed_as(flag, word) for word in words]
            except ValueError as error:
                self.note(typed, f"{error}", trains=True)
                return
            value = typed_words if many else typed_words[-1]
        self.put(".".join(flag.path), value)

    def _of_engine(self, name: str, words: list[str]) -> None:
        if self.engine != "sglang":
            self.note(name, f'an option of SGLang; the engine is "{self.engine}"')
            return
        self.put(f"engine.{name.removeprefix('sglang-').replace('-', '_')}", guessed(words))

    def _of_megatron(self, name: str, words: list[str]) -> None:
        if self.backend != "megatron":
            trains = name in known_flags.TRAINING_MEGATRON
            self.note(name, f'an option of Megatron; the backend is "{self.backend}"', trains=trains)
            return
        self.put(f"backend.{name.replace('-', '_')}", guessed(words))

    # --- Words ----------------------------------------------------------------------------------------------------------

    def _given(self) -> dict[str, list[str]]:
        given: dict[str, list[str]] = {}
        for name, words in said(self.line.words, self.note):
            if name == "eval-prompt-data":
                given.setdefault(name, []).extend(words)
            else:
                given[name] = words
        self.done.add("custom-config-path")
        for name, words in self._custom_config(given.get("custom-config-path", [])[-1:]):
            self.of_file.add(name)
            given[name] = words
        return given

    def _custom_config(self, files: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
        """Its keys as if they were flags, over which they win. ConfigError if it cannot be read."""
        for file in files:
            try:
                keys = yaml.safe_load(Path(file).read_text())
            except (OSError, yaml.YAMLError) as error:
                raise ConfigError(f"--custom-config-path {file}: {error}") from error
            if not isinstance(keys, dict):
                raise ConfigError(f"--custom-config-path {file}: a mapping of keys to values is wanted.")
            for key, value in keys.items():
                name = str(key).replace("_", "-")
                if isinstance(value, list):
                    yield name, [str(item) for item in value]
                elif value is True:
                    yield name, []
                elif value is not None:
                    yield name, [str(value)]

    def _args(self) -> dict[str, Any]:
        """What was said, by the names that old functions read; what is of trainers, engines and trackers is none of theirs."""
        hidden = known_flags.SHAPE | known_flags.MEGATRON | SECRETS | set(known_flags.WITHOUT_EFFECT)
        said_here = {
            name: guessed(words)
            for name, words in self.given.items()
            if name not in hidden and not name.startswith(("sglang-", "router-", "wandb-", "tb-"))
        }
        return {name.replace("-", "_"): value for name, value in sorted(said_here.items())}


def said(words: Sequence[str], note: Callable[..., None]) -> Iterator[tuple[str, list[str]]]:
    """Each flag with its words."""
    name: str | None = None
    values: list[str] = []
    for word in words:
        if not word.startswith("--"):
            if name is None:
                note(word, "unexpected word; flags start with --", trains=True)
            values.append(word)
            continue
        if name is not None:
            yield name, values
        name, has_value, value = word[2:].partition("=")
        name, values = name.replace("_", "-"), [value] if has_value else []
    if name is not None:
        yield name, values


def typed_as(flag: Flag, word: str) -> Any:
    """The word as what the key holds. ValueError if it is none."""
    bare = bare_type(flag.field.annotation)
    inner = bare_type(get_args(bare)[0]) if takes_many(bare) else bare
    if inner not in (int, float):
        return word
    try:
        return inner(word)
    except ValueError:
        raise ValueError(f'"{word}": a number is wanted') from None


def guess(word: str) -> Any:
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(word.lower(), word)


def guessed(words: Sequence[str]) -> Any:
    """A switch, a value, or a list of them."""
    if not words:
        return True
    return guess(words[0]) if len(words) == 1 else [guess(word) for word in words]


RULED_WORDS: Final = """
    advantage-estimator loss-type eps-clip eps-clip-high calculate-per-token-loss kl-loss-type use-tis tis-clip
    tis-clip-low custom-tis-function-path use-opsm opsm-delta use-opd kl-coef kl-loss-coef
    opd-type opd-kl-coef weight-decay adam-beta2
    lr-decay-style use-dynamic-batch-size hf-checkpoint save load ref-load save-hf actor-num-nodes
    actor-num-gpus-per-node offload update-weight-mode update-weight-transport rm-type custom-rm-path group-rm
    custom-generate-function-path dynamic-sampling-filter-path rollout-function-path use-wandb use-tensorboard
    partial-rollout
"""
RULED: Final = frozenset(RULED_WORDS.split())
"""Flags that have a rule here, for near matches."""

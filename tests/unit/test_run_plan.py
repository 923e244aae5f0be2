"""`slime plan`: steps, phases and verdicts of runs whose plugins estimate round numbers. Plugins without an estimate are
listed; their memory is not guessed."""

from dataclasses import fields
from io import StringIO

import pytest
from rich.console import Console

from slime_core.config.bound import BoundRun
from slime_core.contracts.setup import EngineSetup
from slime_core.errors import ConfigError, ModelError
from slime_core.workers.engine_specs import EngineSpecs
from slime_preflight.device_memory import parse_size, target_of
from slime_preflight.planning import Report, Unit
from slime_preflight.run_plan import needed, plan_of, savings
from slime_preflight.step import micro_batches_of, step_of
from slime_preflight.tenants import Target, policy_engines
from slime_training.footprint import kv_bytes_per_token, num_parameters
from slime_training.memory_plan import AWAKE, MemoryItem, MemoryPhase, bytes_at, peak_of

GPU = Target(device="cuda", device_bytes=100, found="a test")
CPU = Target(device="cpu", device_bytes=1000, found="a test")

# On an own line each: weights 10, states 20 that sleep on the host, gradients 7 that are freed, activations 40 of each of
# the load's micro-batches; an engine with weights 5 and keys and values 50; buckets of 3.
ESTIMATED_PLUGINS = """
from slime_core.contracts.backend import BackendDriver, Layout
from slime_core.contracts.driver import DriverConfig
from slime_core.contracts.engine import Capability, EngineDriver
from slime_training.memory_plan import (
    AWAKE, EngineMemory, EnginePlanner, MemoryItem, MemoryPhase, TrainerMemory, TrainerPlanner, TransportMemory,
    TransportPlanner,
)
from slime_core.contracts.needs import Need
from slime_core.contracts.transport import TransportDriver
from slime_core.plugin import driver

SYNC = frozenset({MemoryPhase.SYNC})


def line(component, num_bytes, moments, **more):
    return MemoryItem(component=component, num_bytes=num_bytes, moments=frozenset(moments), **more)


class EstimatedConfig(DriverConfig):
    thrift: bool = False
    \"\"\"Half of the activations.\"\"\"
    thrift_level: int = 0
    \"\"\"Changes nothing.\"\"\"
    wrong: bool = False
    \"\"\"No run can have it.\"\"\"


@driver("slime.backends", "estimated")
class Estimated(TrainerPlanner, BackendDriver):
    Config = EstimatedConfig
    provides = BackendDriver.provides | {Need.VALUES}

    @classmethod
    def build(cls, config):
        raise AssertionError("nothing is built for a plan")

    @classmethod
    def layout(cls, config, rank, world_size):
        return Layout(dp_rank=rank, dp_size=world_size)

    @classmethod
    def problems(cls, config, world_size, model_config):
        return ["wrong"] if config.wrong else []

    @classmethod
    def memory(cls, config, load):
        lines = [
            line("weights", 10, AWAKE),
            line("states", 20, AWAKE - SYNC),
            line("gradients", 7, AWAKE - SYNC, moves=False),
            line("activations", 20 if config.thrift or config.wrong else 40, {MemoryPhase.LOSS}),
            line("copies", 4, AWAKE, place="host"),
        ]
        return TrainerMemory(lines=tuple(lines))

    @classmethod
    def memory_savers(cls, config, load):
        return [{"thrift": True}, {"thrift_level": 3}, {"wrong": True}]


@driver("slime.engines", "estimated")
class EstimatedEngine(EnginePlanner, EngineDriver):
    transports = ("estimated",)
    optional_capabilities = frozenset({Capability.SLEEP})

    @classmethod
    def build(cls, config):
        raise AssertionError("nothing is built for a plan")

    @classmethod
    def memory(cls, config, load):
        asleep = set() if load.setup.offload else {MemoryPhase.ASLEEP}
        lines = [
            line("weights", 5, {MemoryPhase.ROLLOUT, MemoryPhase.SYNC} | asleep),
            line("keys and values", 50, {MemoryPhase.ROLLOUT} | asleep),
        ]
        if load.setup.offload:
            lines.append(line("weights", 5, {MemoryPhase.ASLEEP}, place="host"))
        return EngineMemory(lines=tuple(lines), kv_tokens=25)


@driver("slime.transports", "estimated")
class EstimatedTransport(TransportPlanner, TransportDriver):
    @classmethod
    def build(cls, config):
        raise AssertionError("nothing is built for a plan")

    @classmethod
    def memory(cls, config, num_bytes):
        return TransportMemory(trainer=(line("buckets", 3, SYNC),), engine=(line("buckets", 1, SYNC),))
"""
ESTIMATED = ("--backend", "estimated", "--engine", "estimated")


@pytest.fixture
def estimated(bound, tmp_path):
    """Binds a run of these plugins."""
    (tmp_path / "estimated_plugins.py").write_text(ESTIMATED_PLUGINS)

    def bind(*flags: str, **more) -> BoundRun:
        return bound("--plugin", str(tmp_path / "estimated_plugins.py"), *ESTIMATED, *flags, **more)

    return bind


def phases(group) -> dict[str, int]:
    return {phase.name: phase.num_bytes for phase in group.phases}


def test_a_step_follows_from_the_run_file(bound):
    step = step_of(bound("--rollout-max-prompt-len", "10", "--num-steps-per-rollout", "2", "--global-batch-size", "16"))
    assert (step.prompts, step.responses_per_prompt, step.responses, step.max_response_tokens) == (4, 8, 32, 16)
    assert (step.optimizer_steps, step.responses_per_optimizer_step) == (2, 16)
    assert (step.longest_sequence, step.max_tokens) == (26, 26 * 32)


@pytest.mark.parametrize(
    ("flags", "prompt", "longest"),
    [
        ((), None, None),
        (("--rollout-max-context-len", "20"), 19, 20),
        (("--rollout-max-context-len", "20", "--rollout-max-prompt-len", "2"), 2, 18),
        (("--rollout-max-context-len", "20", "--rollout-max-prompt-len", "9"), 9, 20),
    ],
)
def test_the_longest_sequence(flags, prompt, longest, bound):
    step = step_of(bound(*flags))
    assert (step.max_prompt_tokens, step.longest_sequence) == (prompt, longest)


@pytest.mark.parametrize(
    ("flags", "tokens", "count"),
    [
        # A sequence of 26 sits alone in a micro-batch of 20; 32 of them.
        (("--max-tokens-per-gpu", "20"), 26, 32),
        # Six of them fit; first fit leaves every two neighbours more than that, so at most ten.
        (("--max-tokens-per-gpu", "160"), 160, 10),
        # All 32 fit.
        (("--max-tokens-per-gpu", "9999"), 832, 1),
        (("--no-use-dynamic-batch-size", "--micro-batch-size", "3"), 78, 11),
    ],
)
def test_the_largest_micro_batch(flags, tokens, count, estimated):
    run = estimated("--rollout-max-prompt-len", "10", *flags)
    micro = micro_batches_of(run, run.roles[0], step_of(run), {})
    assert (micro.tokens, micro.count, micro.known) == (tokens, count, True)


def test_prompts_without_a_limit_leave_the_largest_micro_batch_open(estimated):
    run = estimated("--max-tokens-per-gpu", "64")
    micro = micro_batches_of(run, run.roles[0], step_of(run), {})
    assert (micro.tokens, micro.known) == (64, False)


def test_on_separate_devices_nothing_is_offloaded(estimated):
    actor, engines = plan_of(estimated("--launcher", "ray"), GPU).groups
    assert phases(actor) == {
        "actor: score": 37, "actor: loss": 77, "actor: backward": 37, "actor: reduce": 37, "actor: step": 37, "sync": 40,
    }  # fmt: skip
    assert phases(engines) == {"rollout": 55, "sync": 56}
    assert (actor.host_bytes, engines.host_bytes) == (4, 0)


def test_colocated_they_take_turns(estimated):
    (group,) = plan_of(estimated("--launcher", "ray", "--colocate"), GPU).groups
    # Weights alone in sync: 10 of the trainer, 5 of the engine, and the buckets of both.
    assert phases(group) == {
        "rollout": 55, "actor: score": 37, "actor: loss": 77, "actor: backward": 37, "actor: reduce": 37,
        "actor: step": 37, "sync": 10 + 5 + 3 + 1,
    }  # fmt: skip
    # Asleep on the host: weights, states and copies, whose host memory is kept; gradients are freed. Beside the trainer the
    # engine's weights.
    assert {phase.name: phase.host_bytes for phase in group.phases}["rollout"] == 10 + 20 + 4
    assert {phase.name: phase.host_bytes for phase in group.phases}["actor: loss"] == 10 + 20 + 4 + 5
    assert {phase.name: phase.host_bytes for phase in group.phases}["sync"] == 10 + 20 + 4


@pytest.mark.parametrize(
    ("flag", "rollout", "loss", "sync"),
    [
        ("--no-offload-train", 55 + 37, 77, 37 + 5 + 4),
        ("--no-offload-rollout", 55, 77 + 55, 10 + 55 + 4),
    ],
)
def test_a_side_that_is_not_offloaded_is_counted_beside_the_other(flag, rollout, loss, sync, estimated):
    (group,) = plan_of(estimated("--launcher", "ray", "--colocate", flag), GPU).groups
    found = phases(group)
    assert (found["rollout"], found["actor: loss"], found["sync"]) == (rollout, loss, sync)


@pytest.mark.parametrize(
    "flags", [(), ("--colocate", "--concurrency", "31"), ("--colocate", "--update-weights-interval", "2")]
)
def test_engines_are_planned_with_what_they_are_started_with(flags, estimated, monkeypatch):
    run, planned = estimated("--launcher", "ray", *flags), []
    of = run.engine.driver.memory
    monkeypatch.setattr(
        run.engine.driver, "memory", lambda config, load: planned.append(load.setup) or of(config, load)
    )
    policy_engines(run, GPU)
    specs = EngineSpecs(run=run, agreement=None, device="cuda", run_dir=planned[0].run_dir, model_config={})
    (spec, *_) = specs.of_policy()
    differing = {
        field.name
        for field in fields(EngineSetup)
        if getattr(planned[0], field.name) != getattr(spec.setup, field.name)
    }
    assert differing == set()


@pytest.mark.parametrize(
    ("flags", "refills"),
    [
        # Four prompts with eight responses each.
        (("--concurrency", "32"), False),
        (("--concurrency", "31"), True),
        # Each step is collected when the one before has been.
        (("--concurrency", "32", "--max-async-level", "1"), False),
        (("--concurrency", "32", "--max-async-level", "2", "--no-update-weights-in-flight"), False),
        (("--concurrency", "95", "--max-async-level", "2"), True),
        (("--concurrency", "96", "--max-async-level", "2"), False),
        (("--concurrency", "48", "--launcher", "ray", "--max-async-level", "2", "--rollout-num-gpus", "2"), False),
        (("--concurrency", "47", "--over-sampling-batch-size", "6"), True),
        (("--concurrency", "48", "--over-sampling-batch-size", "6"), False),
    ],
)
def test_whether_requests_follow_one_by_one(flags, refills, bound):
    assert bound("--engine", "local", "--backend", "fsdp", *flags).refills is refills


def test_roles_that_share_devices_take_turns(estimated):
    run = estimated("--launcher", "ray", "--algo", "ppo")
    roles, _ = plan_of(run, GPU).groups
    assert [role.name for role in roles.roles] == ["actor", "critic"]
    assert phases(roles)["critic: loss"] == 77
    waiting, _ = plan_of(estimated("--launcher", "ray", "--algo", "ppo", "--no-offload-train"), GPU).groups
    assert phases(waiting)["critic: loss"] == 77 + 37


def test_in_one_process_everything_is_there_at_once(estimated):
    (group,) = plan_of(estimated(), GPU).groups
    assert phases(group)["actor: loss"] == 77 + 55


@pytest.mark.parametrize(("device_bytes", "fits"), [(77, True), (76, False), (None, None)])
def test_the_verdict(device_bytes, fits, estimated):
    plan = plan_of(estimated("--launcher", "ray"), Target(device="cuda", device_bytes=device_bytes, found="a test"))
    actor, _ = plan.groups
    assert plan.fits(actor) is fits


@pytest.mark.parametrize(
    ("device_bytes", "expected"), [(78, "Fits, tightly: 99 % of"), (100, "Fits: 77 % of"), (70, "Does not fit: ")]
)
def test_the_verdict_in_words(device_bytes, expected, estimated):
    plan = plan_of(estimated("--launcher", "ray"), Target(device="cuda", device_bytes=device_bytes, found="a test"))
    run, out = estimated("--launcher", "ray"), StringIO()
    Report(run, plan, [], Unit.of(plan), Console(file=out, width=300)).print()
    assert expected in next(line for line in out.getvalue().splitlines() if line.startswith("actor: "))


def test_a_folder_that_is_not_there_is_named_by_its_key(estimated):
    run = estimated("--launcher", "ray", "--algo", "ppo", "--critic-load", "nowhere")
    with pytest.raises(ModelError, match=r"roles\.critic\.load = .*nowhere: no such folder"):
        plan_of(run, GPU)


def test_on_a_cpu_processes_of_a_machine_are_added_up(estimated):
    plan = plan_of(estimated("--launcher", "ray", "--actor-num-gpus-per-node", "3"), CPU)
    actor, _ = plan.groups
    assert needed(plan, actor) == 3 * (77 + 4)


def test_flags_that_lower_the_peak_are_found_by_planning_again(estimated):
    run = estimated("--launcher", "ray")
    assert [(saving.flags, saving.num_bytes, saving.saved) for saving in savings(run, plan_of(run, GPU))] == [
        ("--thrift", 57, 20)
    ]


def test_plugins_without_an_estimate_are_listed(bound):
    plan = plan_of(bound("--launcher", "ray"), GPU)
    assert [group.not_estimated for group in plan.groups] == [
        ("actor: backend fake has no memory estimate", "sync: the transport has no estimate of its buckets"),
        ("policy engines: engine fake has no memory estimate",),
    ]
    assert [plan.fits(group) for group in plan.groups] == [None, None]


def test_the_report_lists_plugins_without_an_estimate(bound):
    run = bound("--launcher", "ray")
    plan, out = plan_of(run, GPU), StringIO()
    Report(run, plan, [], Unit.of(plan), Console(file=out, width=120)).print()
    assert "not estimated: actor: backend fake has no memory estimate" in out.getvalue()
    assert "actor: nothing is estimated." in out.getvalue()


@pytest.mark.parametrize(
    ("text", "size"),
    [("80GiB", 80 * 2**30), ("141 GB", 141 * 10**9), ("81559MiB", 81559 * 2**20), ("1.5gib", 3 * 2**29)],
)
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["80", "GiB", "80 potatoes", "0GiB", "-1GiB", ""])
def test_a_size_without_a_unit_is_refused(text):
    with pytest.raises(ConfigError, match="a size with its unit is required, such as 80GiB"):
        parse_size(text)


def test_the_device_need_not_be_here():
    assert target_of("cuda", "80GiB") == Target(device="cuda", device_bytes=80 * 2**30, found="--device-memory")
    assert target_of("auto", "80GiB").device == "cuda"
    assert target_of("cpu", "2GiB") == Target(device="cpu", device_bytes=2 * 2**30, found="--device-memory")


def test_moments_and_places():
    lines = [
        MemoryItem(component="weights", num_bytes=2, moments=AWAKE),
        MemoryItem(component="activations", num_bytes=3, moments=frozenset({MemoryPhase.LOSS})),
        MemoryItem(component="copy", num_bytes=9, moments=AWAKE, place="host"),
    ]
    assert peak_of(lines) == (MemoryPhase.LOSS, 5)
    assert bytes_at(lines, MemoryPhase.IDLE, "host") == 9


def test_keys_and_values_of_a_token():
    config = {
        "hidden_size": 8, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 3,
        "intermediate_size": 1, "vocab_size": 1,
    }  # fmt: skip
    # Keys and values of three layers, two heads of two numbers each.
    assert kv_bytes_per_token(config, 2) == 2 * 3 * 2 * 2 * 2
    assert kv_bytes_per_token({**config, "kv_lora_rank": 4}, 2) is None


def test_parameters_of_a_folder_with_and_without_weights(tmp_path):
    from slime_plugin_kit.tiny_model import load_plain, make_tiny_model

    folder = make_tiny_model(tmp_path / "model")
    count = sum(parameter.numel() for parameter in load_plain(folder).parameters())
    assert num_parameters(folder) == count
    for weights in folder.glob("*.safetensors"):
        weights.unlink()
    assert num_parameters(folder) == count

"""Cross-checks of engines: what a run requires of the policy's engines and of those of other models."""

from __future__ import annotations

from collections.abc import Iterable

from slime_core import groups
from slime_core.config.bound import BoundRun
from slime_core.contracts.engine import Capability
from slime_core.contracts.needs import Need
from slime_core.contracts.setup import EngineLayout, RoutingReplay


def routing_replay(run: BoundRun) -> Iterable[str]:
    asked, policy = run.routing_replay, run.roles[0]
    if asked is None:
        return
    from_rollout = asked is RoutingReplay.ROLLOUT
    where = f"train.{'use_rollout_routing_replay' if from_rollout else 'use_routing_replay'} = true"
    if asked not in policy.backend.driver.routing_replay_modes:
        others = sorted(policy.backend.driver.routing_replay_modes)
        yield (
            f'{where}: backend "{policy.backend.name}" replays {"choices " + ", ".join(others) if others else "no choice"} of '
            "experts. Leave it out, or use a backend that does."
        )
    if from_rollout:
        if run.generates and Capability.ROUTED_EXPERTS not in run.engine.driver.optional_capabilities:
            yield (
                f'{where}: engine "{run.engine.name}" does not report which experts it chose. Pass --use-routing-replay to '
                "replay the trainer's own choice, or use an engine that reports it."
            )
        return
    if not any(scoring.column is Need.OLD_LOGPROBS for scoring in policy.plan.scoring):
        yield (
            f'{where}: algorithm "{run.algo.name}" as it is set has no forward for old log-probs, whose choice of experts '
            "could be replayed. Leave it out, or pass --use-rollout-routing-replay to replay the engine's."
        )
    if run.config.train.load_debug_train_data is not None:
        yield f"{where}, train.load_debug_train_data: nothing is scored, so nothing is recorded. Leave it out."
    if run.config.train.on_nonfinite == "skip":
        yield (
            f'{where}, train.on_nonfinite = "skip": what is left without a sample is spread over the ranks again, away from '
            "where the choices of experts are. Leave one of them out."
        )


def penalties(run: BoundRun) -> Iterable[str]:
    if Capability.REPETITION_PENALTY in run.engine.driver.optional_capabilities:
        return
    for settings in run.evals:
        if settings.repetition_penalty != 1:
            yield (
                f"eval.datasets.{settings.name}: repetition_penalty = {settings.repetition_penalty:g}: engine "
                f'"{run.engine.name}" does not penalize the tokens of prompt and response as transformers does. Leave it out, '
                "or pass --engine with one that does."
            )


def rollout_workers(run: BoundRun) -> Iterable[str]:
    where = f"rollout.rollout_workers = {run.config.rollout.rollout_workers}"
    if not run.uses_rollout_workers:
        return
    run.registry.find(groups.LIBRARY, "rollout_workers", where=f"{where}, {groups.LIBRARY}")
    if not run.engine.driver.independent_requests:
        yield (
            f'{where}: engine "{run.engine.name}" generates in a process of the run, and what enters it together decides bits: '
            "workers would change them, and take no work from it. Pass --rollout-workers 0."
        )
    for part in (run.generate, *(settings.generate for settings in run.evals)):
        if part is not None and not part.driver.per_worker:
            yield (
                f'{where}: a run has one generator "{part.name}", and each worker would have its own. Pass '
                "--rollout-workers 0."
            )


def transport(run: BoundRun) -> Iterable[str]:
    chosen, serves = run.transport, run.engine.driver.transports
    if chosen is None:
        return
    if chosen.entry.name in serves:
        yield from chosen.driver.problems(chosen.config, run.engine.config)
    else:
        yield f'sync.transport = "{chosen.name}": engine "{run.engine.name}" understands {", ".join(serves) or "none"}.'
    if chosen.driver.sends_adapters and not run.backend.driver.adapter_rank(run.backend.config):
        yield (
            f'sync.transport = "{chosen.name}": backend "{run.backend.name}" as it is set trains no LoRA adapter. Set the rank '
            "of one, with a backend that trains them, or pass another --transport."
        )
    if chosen.driver.sends_adapters and run.config.model.rollout_load is not None:
        yield (
            f'sync.transport = "{chosen.name}", model.rollout_load: the adapter is trained beside the weights of '
            "model.hf_checkpoint, so engines must have these. Leave rollout_load out, or pass another --transport."
        )


def colocation(run: BoundRun) -> Iterable[str]:
    launcher, ahead = run.config.launcher, run.config.rollout.max_async_level
    if launcher.colocate and ahead:
        yield (
            f"launcher.colocate = true: trainer and engines take turns on their devices, so rollouts cannot run "
            f"{ahead} step(s) ahead. Pass --max-async-level 0, or give the engines devices of their own."
        )
    if launcher.colocate and run.config.eval.async_eval:
        yield (
            "launcher.colocate = true, eval.async_eval = true: nothing generates while the trainer has the devices. "
            "Leave one of them out."
        )
    if launcher.offload_rollout is not None and not launcher.colocate:
        yield (
            f"launcher.offload_rollout = {str(launcher.offload_rollout).lower()}: the engines have devices of their own. "
            "Pass --colocate, or leave it out."
        )
    if (
        launcher.colocate
        and launcher.offload_rollout
        and Capability.SLEEP not in run.engine.driver.optional_capabilities
    ):
        yield f'launcher.offload_rollout = true: engine "{run.engine.name}" cannot give its memory back. Leave it out.'


def media(run: BoundRun) -> Iterable[str]:
    if not run.media:
        return
    asked = f"data.multimodal_keys = {dict(run.config.data.multimodal_keys)}"
    for backend in dict.fromkeys(role.backend.name for role in run.roles if not role.backend.driver.supports_images):
        yield f'{asked}: backend "{backend}" does not train models with images. Pass --backend with one that does.'
    for needed in dict.fromkeys(part.driver.needs for part in run.media):
        if run.generates and needed not in run.engine.driver.optional_capabilities:
            yield f'{asked}: engine "{run.engine.name}" takes no {needed}. Pass --engine with one that does.'
    if len(dists := sorted({part.entry.dist for part in run.media})) > 1:
        yield f"{asked}: {' and '.join(dists)} do not share prompts. Use modalities of one of them."
    if run.teacher is not None:
        yield (
            f"{asked}, engines.teacher: what a teacher's engine scores has no images. Name the teacher's folder with "
            "--opd-teacher-load instead."
        )


def engine_layouts(run: BoundRun) -> Iterable[str]:
    launcher, problems = run.config.launcher, []
    if run.generates:
        layout = layout_of_policy(run)
        problems += run.engine.driver.layout_problems(run.engine.config, layout)
        if run.transport is not None:
            problems += run.transport.driver.layout_problems(run.transport.config, run.engine.config, layout)
    for row in run.served:
        layout = EngineLayout(
            num_devices=row.num_devices,
            devices_flag=f"--engines.{row.name}.num_gpus_per_engine",
            num_engines=row.num_engines,
            num_nodes=launcher.nodes_of(row.num_devices),
            device=None if launcher.device == "auto" else launcher.device,
        )
        problems += row.engine.driver.layout_problems(row.engine.config, layout)
    return dict.fromkeys(problems)


def layout_of_policy(run: BoundRun) -> EngineLayout:
    launcher = run.config.launcher
    return EngineLayout(
        num_devices=launcher.rollout_num_gpus_per_engine,
        devices_flag="--rollout-num-gpus-per-engine",
        num_engines=launcher.num_engines,
        num_nodes=launcher.nodes_of(launcher.rollout_num_gpus_per_engine),
        routed_experts=run.routing_replay is RoutingReplay.ROLLOUT,
        adapter_rank=run.adapter_rank,
        # "auto" is decided where the run starts; colocated engines of a run that names no device are for GPUs.
        offload=launcher.offloads_rollout("cpu" if launcher.device == "cpu" else "cuda"),
        device=None if launcher.device == "auto" else launcher.device,
    )


def engines_over_nodes(run: BoundRun) -> Iterable[str]:
    launcher = run.config.launcher
    engines = [("launcher.rollout_num_gpus_per_engine", run.engine, launcher.rollout_num_gpus_per_engine)]
    engines += [(f"engines.{row.name}.num_gpus_per_engine", row.engine, row.num_devices) for row in run.served]
    for key, engine, num_devices in engines:
        if launcher.nodes_of(num_devices) == 1:
            continue
        asked = f"{key} = {num_devices}, but a machine has launcher.num_gpus_per_node = {launcher.num_gpus_per_node}"
        if run.launcher.driver.single_process:
            yield f"{asked}: an engine over several machines needs {run.other_launchers}."
        if not engine.driver.spans_nodes:
            yield f'{asked}: engine "{engine.name}" stays on one machine.'
        if num_devices % launcher.num_gpus_per_node:
            yield f"{asked}: an engine that spans machines has all devices of each. Choose a multiple."


def reward_model(run: BoundRun) -> Iterable[str]:
    """A reward that requires a reward model has one, and a reward model that is set is used."""
    row = run.reward_model
    asking = [part for part in run.reward_parts if part.driver.needs_reward_model(part.config)]
    if row is None:
        for part in asking:
            yield (
                f'{part.where}: reward "{part.name}" requires a model that engines of this run serve, and there is none. '
                "Pass --engines.reward.load FOLDER, or the address of one that is served already."
            )
        return
    if not asking:
        yield "engines.reward: no reward of this run asks it. Leave it out, or choose a reward that does."
    if Capability.HTTP not in row.engine.driver.optional_capabilities:
        yield (
            f'engines.reward: engine "{row.engine.name}" serves no requests over HTTP. Pass --engines.reward.engine with one '
            "that does."
        )
    if run.config.launcher.colocate:
        yield "engines.reward, launcher.colocate = true: a reward model needs devices of its own."

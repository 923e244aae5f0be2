"""Rules for `launcher` and `engine`: verl's trainer and engines take turns on the same GPUs."""

from __future__ import annotations

from slime_compat.peer import PeerTranslation
from slime_compat.verl.defaults import ROLLOUT


def launcher(translation: PeerTranslation) -> None:
    nodes, ranks = translation.number("trainer.nnodes", int), translation.number("trainer.n_gpus_per_node", int)
    per_engine = translation.number(f"{ROLLOUT}.tensor_model_parallel_size", int)
    translation.put("launcher.name", "ray" if nodes * ranks > 1 else "local")
    translation.put("launcher.actor_num_nodes", nodes)
    translation.put("launcher.actor_num_gpus_per_node", ranks)
    translation.put("launcher.colocate", True)
    translation.put("launcher.rollout_num_gpus", nodes * ranks)
    translation.put("launcher.rollout_num_gpus_per_engine", per_engine)
    translation.put("launcher.num_gpus_per_node", ranks)
    translation.put("engine.name", translation.engine)
    memory, named = translation.number(f"{ROLLOUT}.gpu_memory_utilization", float), translation.text(f"{ROLLOUT}.name")
    translation.put_memory_share(memory)
    if named and named != translation.engine:
        translation.note(
            f"{ROLLOUT}.name",
            f"{named}: the engine is {translation.engine} here, and its own options are left out; --engine names another",
        )


def sampling(translation: PeerTranslation) -> None:
    translation.put("rollout.rollout_temperature", translation.number(f"{ROLLOUT}.temperature", float))
    translation.put("rollout.rollout_top_p", translation.number(f"{ROLLOUT}.top_p", float))
    top_k = translation.number(f"{ROLLOUT}.top_k", int)
    # 0 is off for verl's rollouts with transformers.
    translation.put("rollout.rollout_top_k", top_k or -1)

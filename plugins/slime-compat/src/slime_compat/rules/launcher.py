"""Rules for `launcher` (devices), and for how the engines get new weights."""

from __future__ import annotations

from slime_compat.translation import Translation


def launcher(translation: Translation) -> None:
    nodes = translation.number("actor-num-nodes", int, 1)
    ranks = translation.number("actor-num-gpus-per-node", int, 8)
    translation.put("launcher.actor_num_nodes", nodes)
    translation.put("launcher.actor_num_gpus_per_node", ranks)
    # One trainer rank runs without Ray; several require it.
    translation.put("launcher.name", "ray" if nodes * ranks > 1 else "local")
    if translation.take("offload"):
        translation.put("launcher.offload_train", True)
        if "colocate" in translation.given:
            translation.put("launcher.offload_rollout", True)
    if "colocate" in translation.given and translation.take("rollout-num-gpus"):
        translation.note("rollout-num-gpus", "left out, since with --colocate the engines use the trainer's devices")
        translation.put("launcher.rollout_num_gpus", nodes * ranks)
    elif "colocate" in translation.given:
        translation.put("launcher.rollout_num_gpus", nodes * ranks)
    mode, transport = translation.take("update-weight-mode"), translation.take("update-weight-transport")
    if mode == "delta" or transport == "disk":
        translation.put("sync.transport", "delta" if mode == "delta" else "disk")
    concurrency = translation.number("sglang-server-concurrency", int, None)
    if concurrency is not None:
        translation.put("rollout.concurrency", concurrency)
    if translation.take("prefill-num-servers"):
        translation.note("prefill-num-servers", "pass --sglang-servers, --sglang-prefill-servers and --router-policy")

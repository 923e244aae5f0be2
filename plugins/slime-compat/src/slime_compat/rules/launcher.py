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
    prefill(translation)


def prefill(translation: Translation) -> None:
    """Upstream's engines are servers that only prefill or only decode. Here they are the servers of one engine."""
    count = translation.number("prefill-num-servers", int, None)
    if count is None:
        return
    launcher = translation.tables["launcher"]
    devices = launcher.get("rollout_num_gpus") or translation.number("rollout-num-gpus", int, None)
    each = translation.number("rollout-num-gpus-per-engine", int, 1)
    if not devices or devices % each or devices // each <= count:
        translation.note(
            "prefill-num-servers",
            f"{count}: requires a --rollout-num-gpus that is a multiple of --rollout-num-gpus-per-engine, for more servers",
        )
        return
    translation.put("launcher.rollout_num_gpus", devices)
    translation.put("launcher.rollout_num_gpus_per_engine", devices)
    translation.put("engine.servers", devices // each)
    translation.put("engine.prefill_servers", count)
    translation.put("engine.router_policy", translation.take("router-policy") or "cache_aware")

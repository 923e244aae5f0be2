"""What is raised for a message that cannot be pickled. Other messages pass."""

from __future__ import annotations

from slime_core.errors import PluginError
from slime_core.registry.boundary import error_text


def unsendable_error(what: str, cause: Exception) -> PluginError:
    """`what`: what a message has, such as `generator "mine", the samples of train.jsonl, line 3`."""
    error = PluginError(
        f"{what}: cannot be sent between a rollout worker and the driver: {error_text(cause)}. Use plain values "
        "(dict, list, str, numbers), or --rollout-workers 0."
    )
    error.__cause__ = cause
    return error

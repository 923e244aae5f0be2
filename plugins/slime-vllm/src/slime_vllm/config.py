"""Options of the engine: this plugin's own, and those of vLLM's servers beside them. Imports nothing heavy."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field, create_model, field_validator

from slime_core.contracts.driver import DriverConfig
from slime_core.contracts.paths import RunPath
from slime_vllm.server_args import OWNED, shipped_options


class VllmOptions(DriverConfig):
    compares_weights: ClassVar[bool] = False
    """See `slime_transports.plugin`."""
    python: RunPath | None = None
    """Interpreter that starts the servers, such as `.venv-vllm/bin/python`: it needs vLLM, and nothing of slime. By default the
    run's own."""
    servers: int = Field(default=1, ge=1)
    """Servers of one engine, each with an equal share of its devices; requests go to the one with the fewest, those of one
    session to one server."""
    external_engine_addrs: tuple[str, ...] = ()
    """Servers that the run did not start, as `host:port` or URL, instead of its own: `servers` of them for each engine, in
    order. Their workers must have the extension `slime_vllm_server.worker`."""
    external_engine_token_file: RunPath | None = None
    """File with the bearer token of the external servers."""
    start_timeout: float = Field(default=900.0, gt=0)
    """Seconds until a server must respond. On a GPU the first start compiles kernels for minutes."""
    request_timeout: float = Field(default=14400.0, gt=0)
    """Seconds for one response."""
    control_timeout: float = Field(default=300.0, gt=0)
    """Seconds for a call that is no generation: loading one bucket, pausing."""
    health_timeout: float = Field(default=30.0, gt=0)
    """Seconds within which a healthy server responds."""


def make_config() -> type[VllmOptions]:
    """VllmOptions with the server's options beside its own. None: what vLLM does by default."""
    fields: dict[str, Any] = {}
    for option in shipped_options():
        if option.name in VllmOptions.model_fields:
            continue
        if option.name in OWNED:
            doc = f"Not an option of a run: decided by {OWNED[option.name]}."
            fields[option.name] = (Any, Field(default=None, description=doc, exclude=True, repr=False))
        else:
            doc = option.doc or "See vLLM's documentation."
            fields[option.name] = (option.type | None, Field(default=None, description=doc))

    def refuse(value: Any, info: Any) -> Any:
        if value is not None:
            raise ValueError(f"this is not an option of the engine: it is decided by {OWNED[info.field_name]}")
        return value

    refused = sorted(set(OWNED) & set(fields))
    validators: dict[str, Any] = {"refuse": field_validator(*refused)(refuse)}
    return create_model("VllmConfig", __base__=VllmOptions, __validators__=validators, **fields)


def server_options(config: Any) -> dict[str, Any]:
    """Those of the server's options that the run file gives."""
    names = {option.name for option in shipped_options()} - set(OWNED) - set(VllmOptions.model_fields)
    return {name: value for name in sorted(names) if (value := getattr(config, name)) is not None}

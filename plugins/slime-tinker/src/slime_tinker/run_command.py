"""slime serve: serves programs that are written against the Tinker SDK."""

from __future__ import annotations

import contextlib
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from slime_core.errors import ConfigError

if TYPE_CHECKING:
    from slime_session import TrainingSession
    from slime_tinker.models import Models
    from slime_tinker.settings import Tls

app = typer.Typer()

MOST_DATUMS: Final = 1024
FORCED: Final[dict[str, Any]] = {
    "rollout.rollout_batch_size": MOST_DATUMS,
    "rollout.n_samples_per_prompt": 1,
    "rollout.rollout_temperature": 1.0,
    "rollout.collector": "accepted",
    "train.global_batch_size": MOST_DATUMS,
}
"""What clients decide, so that the run file cannot: sizes of batches, and the temperature of a trainer's log-probs."""
NOT_USED: Final[dict[str, Any]] = {
    "algo": "sft",
    "data.source": "sums",
    "rollout.rollout_max_response_len": 1,
    "train.num_rollout": 1,
}
"""What every run file has to have, and no client's program reads; the run file may leave it out."""
FORCED_OF_WHOLE: Final[dict[str, Any]] = {"train.max_skipped_steps": 2**31 - 1}
"""With all weights of one model: a skipped step fails its request, and ends nothing."""
DEFAULT_KEYS: Final = Path("slime-serve-keys.json")


@app.command()
def serve(
    run_file: Annotated[Path, typer.Argument(help="Run file: model, backend, engine and launcher.")],
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="KEY=VALUE of the run file, as TOML; may be given several times.")
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Name of the base model for clients; by default that of its folder.")
    ] = None,
    full_parameters: Annotated[
        bool, typer.Option("--full-parameters", help="Train all weights of one model at a time, and no LoRA adapters.")
    ] = False,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0: any free one.")] = 8700,
    keys: Annotated[Path, typer.Option(help="File of keys, which slime serve keys add writes.")] = DEFAULT_KEYS,
    no_keys: Annotated[bool, typer.Option("--no-keys", help="Serve all callers that reach the port.")] = False,
    tls_certificate: Annotated[Path | None, typer.Option(help="PEM file; needed for addresses of a network.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="PEM file of its key.")] = None,
    state: Annotated[
        Path | None, typer.Option(help="Folder of all that outlives the server; by default RUNS_DIR/NAME-served.")
    ] = None,
    max_models: Annotated[int, typer.Option(help="Models of a tenant at a time.", min=1)] = 4,
    max_tokens: Annotated[int, typer.Option(help="Tokens of one forward_backward.", min=1)] = 1_000_000,
    max_body_mib: Annotated[int, typer.Option(help="MiB of a request, decompressed.", min=1)] = 64,
    session_minutes: Annotated[
        float, typer.Option(help="A client that was not heard of for so long has gone.", min=0.1)
    ] = 60.0,
) -> None:
    """Serve programs that are written against the Tinker SDK."""
    tls = check_access(host, keys, no_keys=no_keys, certificate=tls_certificate, key=tls_key)
    from slime_core.registry import Registry
    from slime_serving.listener import listen, shown
    from slime_session import open_session
    from slime_tinker.keys import Keys
    from slime_tinker.serve import BACKLOG
    from slime_tinker.serve import serve as run
    from slime_tinker.settings import Limits, Retention, Settings

    overrides = overridden(run_file, set_ or [], full_parameters=full_parameters)
    listener = listen(host, port, backlog=BACKLOG)
    with open_session(run_file, overrides=overrides) as session:
        models = models_of(session, name, full_parameters=full_parameters)
        settings = Settings(
            state=state or session.folder.with_name(f"{session.run.config.name}-served"),
            limits=Limits(max_models=max_models, max_tokens=max_tokens, max_body_bytes=max_body_mib * 2**20),
            retention=Retention(session_s=60.0 * session_minutes),
        )
        who = "no key required" if no_keys else f"keys in {keys}"
        address = shown(listener, host).replace("http", "http" if tls is None else "https", 1)
        run(
            models,
            settings,
            Registry.from_environment(),
            listener=listener,
            # Read again for each request, so that keys come and go while it serves.
            keys=None if no_keys else lambda: Keys.read(keys),
            tls=tls,
            ready=lambda: print(f"slime serves {models.base.name} at {address}, {who}", flush=True),
        )


def models_of(session: TrainingSession, name: str | None, *, full_parameters: bool) -> Models:
    """`name`: of the base model, for clients; None: that of its folder."""
    from slime_tinker.session_adapters import SessionAdapters
    from slime_tinker.session_weights import SessionWeights

    kind = SessionWeights if full_parameters else SessionAdapters
    return kind(session, name=name or Path(session.run.config.model.hf_checkpoint).resolve().name)


def check_access(host: str, keys: Path, *, no_keys: bool, certificate: Path | None, key: Path | None) -> Tls | None:
    """ConfigError for what would let strangers in."""
    from slime_serving.listener import is_loopback
    from slime_tinker.keys import Keys
    from slime_tinker.settings import Tls

    if (certificate is None) != (key is None):
        raise ConfigError("--tls-certificate and --tls-key: one is missing; give both or none.")
    for path in (certificate, key):
        if path is not None and not path.is_file():
            raise ConfigError(f"{path}: no such file.")
    if certificate is None and not is_loopback(host):
        raise ConfigError(
            f"--host {host}: without TLS, keys and data would cross the network readable. Pass --tls-certificate and "
            "--tls-key, or listen on 127.0.0.1."
        )
    if no_keys and not is_loopback(host):
        raise ConfigError(
            f"--no-keys with --host {host}: everyone who reaches this machine could train. Omit --no-keys."
        )
    if not no_keys and not Keys.read(keys).keys:
        raise ConfigError(f"{keys}: there are no keys. slime serve keys add NAME --keys {keys} makes one.")
    return None if certificate is None or key is None else Tls(certificate=certificate, key=key)


def overridden(run_file: Path, words: list[str], *, full_parameters: bool) -> dict[str, Any]:
    """Keys of the run file that it lacks, that `--set` gives and that clients decide."""
    from slime_core.config.load import read_run_file

    tables = read_run_file(run_file)
    kept, forced = ({}, FORCED_OF_WHOLE) if full_parameters else (kept_weights(tables), {})
    return {**left_out(tables), **kept, **chosen(words), **FORCED, **forced}


def left_out(tables: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of NOT_USED that the run file lacks.

    >>> left_out({"algo": "sft", "data": {"prompt_data": "a.jsonl"}, "train": {"num_rollout": 3}})
    {'rollout.rollout_max_response_len': 1}
    """
    found = {}
    for key, value in NOT_USED.items():
        table, _, name = key.rpartition(".")
        given = tables.get(table, {}) if table else tables
        if name not in given and not (table == "data" and given):
            found[key] = value
    return found


def kept_weights(tables: Mapping[str, Any]) -> dict[str, Any]:
    """The transport of engines over servers, whose weights are frozen, unless the run file names one.

    >>> kept_weights({"engine": {"name": "vllm", "max_adapters": 8}})
    {'sync.transport': 'frozen'}
    >>> kept_weights({"engine": {"name": "local", "max_adapters": 8}})
    {}
    """
    engine = tables.get("engine")
    over_servers = isinstance(engine, Mapping) and engine.get("name") != "local" and engine.get("max_adapters")
    return {"sync.transport": "frozen"} if over_servers and "transport" not in tables.get("sync", {}) else {}


def chosen(words: list[str]) -> dict[str, Any]:
    """Keys and values of `--set`.

    >>> chosen(["train.seed=1", 'name="a"', "engine.name=local"])
    {'train.seed': 1, 'name': 'a', 'engine.name': 'local'}
    """
    found = {}
    for word in words:
        key, is_pair, value = word.partition("=")
        if not is_pair or not key:
            raise ConfigError(f"--set {word}: must be KEY=VALUE.")
        if key in FORCED:
            raise ConfigError(f"--set {word}: clients decide this; leave it out.")
        found[key] = value
        with contextlib.suppress(tomllib.TOMLDecodeError):
            found[key] = tomllib.loads(f"value = {value}")["value"]
    return found

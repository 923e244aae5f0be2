"""Runs a Python launcher of upstream and writes the command lines that it would run, as JSON: python launcher_child.py FILE OUT

Its commands are recorded. Processes, network and pauses are replaced before it starts, and an audit hook ends it should it
reach one of them by another way, or write outside its folder for temporary files.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import tempfile
import time
import types
import urllib.request
from pathlib import Path
from typing import Any, Final

REFUSED: Final = (
    "subprocess.Popen",
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.fork",
    "socket.connect",
    "socket.bind",
)
WRITING: Final = ("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.chmod", "os.truncate")


class Ended:
    """A process that has been started, and has ended well."""

    pid, returncode, stdout, stderr = 0, 0, "", ""

    def __init__(self, *words: Any, **options: Any) -> None:
        pass

    def poll(self) -> None:
        return None

    def wait(self, *words: Any, **options: Any) -> int:
        return 0

    terminate = kill = wait


class Healthy:
    """The response of any server."""

    status = 200

    def __enter__(self) -> Healthy:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def read(self) -> bytes:
        return b"{}"


def main() -> None:
    launcher, out = Path(sys.argv[1]), Path(sys.argv[2])
    own = Path(tempfile.gettempdir()).resolve()
    lines: list[str] = []
    root = next(folder for folder in launcher.resolve().parents if (folder / "slime").is_dir())

    def execute_train(
        train_args: str,
        num_gpus_per_node: int,
        megatron_model_type: str | None,
        train_script: str = "train.py",
        **_: Any,
    ) -> None:
        model = f'source "{root}/scripts/models/{megatron_model_type}.sh"\n' if megatron_model_type else ""
        words = "${MODEL_ARGS[@]}" if megatron_model_type else ""
        lines.append(f"{model}python3 {train_script} {words} {train_args}\n")

    commands: dict[str, Any] = {
        "execute_train": execute_train,
        "exec_command": lambda command, capture_output=False: "0" if capture_output else None,
        "convert_checkpoint": lambda *words, **options: None,
        "hf_download_dataset": lambda *words, **options: None,
        "rsync_simple": lambda *words, **options: None,
        "fp8_cast_bf16": lambda *words, **options: None,
        "get_default_wandb_args": lambda *words, **options: "",
        "get_bool_env_var": lambda name, default="false": os.environ.get(name, default).lower() in ("1", "true"),
    }
    for name in ("slime", "slime.utils", "slime.utils.external_utils", "slime.utils.misc"):
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = []  # type: ignore[attr-defined]
    module = types.ModuleType("slime.utils.external_utils.command_utils")
    sys.modules[module.__name__] = module
    for of in (module, sys.modules["slime.utils.misc"]):
        vars(of).update(commands)
    # `import a.b.c as x` reads the attributes.
    sys.modules["slime"].utils = sys.modules["slime.utils"]  # type: ignore[attr-defined]
    sys.modules["slime.utils"].misc = sys.modules["slime.utils.misc"]  # type: ignore[attr-defined]
    sys.modules["slime.utils"].external_utils = sys.modules["slime.utils.external_utils"]  # type: ignore[attr-defined]
    sys.modules["slime.utils.external_utils"].command_utils = module  # type: ignore[attr-defined]

    import subprocess

    subprocess.Popen = Ended  # type: ignore[assignment,misc]
    subprocess.run = lambda *words, **options: Ended()  # type: ignore[assignment]
    subprocess.check_output = lambda *words, **options: ""  # type: ignore[assignment]
    urllib.request.urlopen = lambda *words, **options: Healthy()  # type: ignore[assignment]
    time.sleep = lambda seconds: None

    def is_own(path: Path) -> bool:
        return own in (path, *path.parents) or str(path) == os.devnull

    def watch(event: str, values: tuple[Any, ...]) -> None:
        if event in REFUSED:
            raise PermissionError(f"{event}: not while a launcher is read")
        writes = event in WRITING or (event == "open" and isinstance(values[1], str) and set(values[1]) & set("wax+"))
        if writes and isinstance(values[0], str | Path) and not is_own(Path(values[0]).resolve()):
            raise PermissionError(f"{event} {values[0]}: not while a launcher is read")

    # Data and models are there, as far as a launcher asks.
    there = os.path.exists
    os.path.exists = lambda path: str(path).startswith("/root/") or there(path)  # type: ignore[assignment]
    # Launchers delete them.
    os.environ |= dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "")
    os.environ["MASTER_ADDR"] = "10.0.0.1"
    sys.argv = [str(launcher)]
    sys.addaudithook(watch)
    try:
        # It may end with an error: some launchers check what a training has written.
        runpy.run_path(str(launcher), run_name="__main__")
    finally:
        own.joinpath(out.name).write_text(json.dumps(lines))


if __name__ == "__main__":
    main()

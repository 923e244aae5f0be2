"""PluginFile: a plugin that is one Python file. Its text, not its path, is what a run depends on: the text is hashed
into the run's fingerprint and travels to the workers, where the file need not exist."""

from __future__ import annotations

import hashlib
import importlib.abc
import importlib.util
import linecache
import re
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Final

from slime_core import groups
from slime_core.errors import PluginError
from slime_core.registry.entry import Entry
from slime_core.registry.mark import mark_of

HOOK_MARK: Final = "slime_impl"
"""The attribute that pluggy's marker leaves on a function (project name + `_impl`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginFile:
    """Plain data: it can be pickled or sent as JSON, and gives the same registry entries anywhere."""

    path: Path
    """Where it was read; later only a name for error messages."""
    text: str
    sha256: str

    @classmethod
    def read(cls, path: Path) -> PluginFile:
        try:
            data = path.read_bytes()
        except OSError as error:
            raise PluginError(f"--plugin {path}: cannot be read: {error.strerror}. Give one Python file.") from error
        try:
            text = importlib.util.decode_source(data)
        except (SyntaxError, UnicodeDecodeError) as error:
            raise PluginError(f"--plugin {path}: is not Python source text: {error}. Give one Python file.") from error
        return cls(path=path, text=text, sha256=hashlib.sha256(text.encode()).hexdigest())

    @property
    def version(self) -> str:
        return self.sha256[:12]

    @property
    def module_name(self) -> str:
        """Differs whenever the content differs, so two versions of a file never share a module."""
        return f"slime_plugin_{re.sub(r'[^0-9a-zA-Z_]', '_', self.path.stem)}_{self.version}"

    def load(self) -> dict[Entry, object]:
        """Runs the file, once per process and content, and collects what it marks.

        PluginError if it fails, gives one name twice, or marks nothing.
        """
        module = self._module()
        found: dict[Entry, object] = {}
        observes = False
        for attribute, thing in vars(module).items():
            if getattr(thing, "__module__", None) != module.__name__:
                continue
            observes = observes or hasattr(thing, HOOK_MARK)
            mark = mark_of(thing)
            if mark is None or any(thing is known for known in found.values()):
                continue
            entry = self._entry(mark.group, mark.name, attribute)
            twice = [known for known in found if (known.group, known.name) == (entry.group, entry.name)]
            if twice:
                raise PluginError(
                    f'--plugin {self.path}: gives the name "{entry.name}" in {entry.group} twice '
                    f"({twice[0].target}, {entry.target}); rename one."
                )
            found[entry] = thing
        if observes:
            name = re.sub(r"[^a-z0-9_-]", "_", self.path.stem.lower())
            found[self._entry(groups.HOOKS, name, "")] = module
        if not found:
            raise PluginError(
                f"--plugin {self.path}: registers nothing. Mark a function with a decorator of slime_core.plugin, "
                'such as @reward("name").'
            )
        return found

    def _entry(self, group: str, name: str, attribute: str) -> Entry:
        target = f"{self.path.name}:{attribute}" if attribute else self.path.name
        return Entry(group, name, self.path.name, self.version, target)

    def _module(self) -> ModuleType:
        name = self.module_name
        if name in sys.modules:
            return sys.modules[name]
        # Before running it: pydantic reads field docstrings from the source while a class is being made. An entry
        # without a time stamp is never compared with the disk, where the file may have changed or not exist.
        linecache.cache[str(self.path)] = (len(self.text), None, self.text.splitlines(keepends=True), str(self.path))
        spec = importlib.util.spec_from_file_location(name, self.path, loader=_TextLoader(self))
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        # Whatever a user's file raises is reported with its name; SystemExit and failed asserts included.
        except (Exception, SystemExit) as error:
            del sys.modules[name]
            raise PluginError(self._failure(error)) from error
        return module

    def _failure(self, error: BaseException) -> str:
        line = _line_of(error, str(self.path))
        text = f"--plugin {self.path}{line}: {type(error).__name__}: {error}"
        if isinstance(error, ModuleNotFoundError) and error.name and self._is_beside(error.name):
            text += f". A plugin file must be one file: {error.name} beside it is not sent to workers; make it a distribution"
        return text

    def _is_beside(self, module: str) -> bool:
        sibling = self.path.parent / module.partition(".")[0]
        return sibling.is_dir() or sibling.with_suffix(".py").is_file()


class _TextLoader(importlib.abc.ExecutionLoader):
    """Runs a module from text. Tracebacks and inspect.getsource find the lines through it."""

    def __init__(self, file: PluginFile) -> None:
        self._file = file

    def get_filename(self, fullname: str) -> str:
        return str(self._file.path)

    def get_source(self, fullname: str) -> str:
        return self._file.text


def _line_of(error: BaseException, filename: str) -> str:
    if isinstance(error, SyntaxError) and error.filename == filename:
        return f", line {error.lineno}"
    lines = [line for frame, line in traceback.walk_tb(error.__traceback__) if frame.f_code.co_filename == filename]
    return f", line {lines[-1]}" if lines else ""

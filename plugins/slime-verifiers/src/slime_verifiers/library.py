"""Checks that the verifiers library is installed, and loads environments and tasksets from it."""

from __future__ import annotations

import importlib.metadata
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, ForwardRef, get_args

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from slime_core.errors import ConfigError, PluginError
from slime_core.registry.boundary import foreign

if TYPE_CHECKING:
    import verifiers.v1 as vf

VERSIONS: Final = SpecifierSet(">=0.4,<0.5")
HOW_TO_INSTALL: Final = 'pip install "slime-verifiers[verifiers]"'


def require_library(asked_by: str) -> None:
    """PluginError if verifiers is not installed, or in another version."""
    try:
        version = importlib.metadata.version("verifiers")
    except importlib.metadata.PackageNotFoundError:
        raise PluginError(f'{asked_by} = "verifiers": verifiers is not installed here: {HOW_TO_INSTALL}') from None
    if not VERSIONS.contains(version, prereleases=True):
        raise PluginError(
            f'{asked_by} = "verifiers": verifiers {version} is installed, and {VERSIONS} is required (environments of earlier '
            f"versions use another API): {HOW_TO_INSTALL}"
        )


def load_environment(table: Mapping[str, Any], folder: str | None) -> vf.EnvConfig:
    """The environment's configuration, of its own type. PluginError if there is no such taskset or environment, or if it cannot
    be imported; ConfigError if its options are invalid."""
    import verifiers.v1 as vf

    return _loaded(lambda: vf.resolve_env_config(dict(table)), table, "generate.env", "generate.folder", folder)


def load_taskset(table: Mapping[str, Any], folder: str | None) -> vf.Taskset[Any, Any]:
    """Loads the taskset of `data.taskset`. Errors as in `load_environment`."""
    import verifiers.v1 as vf

    def load() -> vf.Taskset[Any, Any]:
        return vf.load_taskset(vf.taskset_config_type(table["id"]).model_validate(dict(table)))

    return _loaded(load, {"taskset": table}, "data", "data.folder", folder)


def _loaded(load: Any, table: Mapping[str, Any], where: str, folder_key: str, folder: str | None) -> Any:
    asked = f'{where}.taskset = "{table["taskset"]["id"]}"' + (
        f', {where}.id = "{table["id"]}"' if "id" in table else ""
    )
    for name in filter(None, (table["taskset"]["id"], table.get("id"))):
        if not module_of(str(name)).isidentifier() or str(name).startswith((".", "/", "~")):
            raise PluginError(
                f'{asked}: "{name}" is not the name of a module. For a file such as envs/sums.py, set id = "sums" and '
                f'{folder_key} = "envs".'
            )
    if folder is not None and not Path(folder).is_dir():
        raise PluginError(f'{folder_key} = "{folder}": there is no such folder.')
    if folder is not None and folder not in sys.path:
        # Appended: it must not hide installed packages.
        sys.path.append(folder)
    # Importing a module and making its taskset runs its author's code, which may end the process too.
    with foreign(asked, "load"):
        return _named(load, table, where, folder, folder_key, asked)


def _named(load: Any, table: Mapping[str, Any], where: str, folder: str | None, folder_key: str, asked: str) -> Any:
    from pydantic import ValidationError

    try:
        return load()
    except ValidationError as error:
        raise ConfigError(
            [f"{where}.{'.'.join(map(str, found['loc']))}: {found['msg']}" for found in error.errors()]
        ) from error
    except ModuleNotFoundError as error:
        missing = error.__cause__.name if isinstance(error.__cause__, ModuleNotFoundError) else error.name
        if missing is not None and missing not in {module_of(one) for one in ids(table)}:
            raise PluginError(f"{asked}: it requires {missing}, which is not installed. Install it.") from error
        there = ", ".join(installed()) or "no package that requires verifiers"
        inside = "" if folder is None else f" In {folder_key}: {', '.join(modules_in(folder)) or 'no module'}."
        raise PluginError(
            f"{asked}: there is no such module. Installed: {there}.{inside} Install the environment's package, or set "
            f"{folder_key} to the folder of its module."
        ) from error
    except (AttributeError, TypeError, ValueError) as error:
        # The library raises these for a module that is no taskset.
        raise PluginError(f"{asked}: {error}{place_of(error)}") from error
    except Exception as error:
        raise failure(asked, error) from error


def failure(asked: str, error: Exception) -> PluginError:
    """The error for one that the code of a taskset or an environment raised."""
    return PluginError(f"{asked}: its code raised {type(error).__name__}: {error}{place_of(error)}")


def place_of(error: Exception) -> str:
    """` (FILE:LINE)`, where it was raised; empty in the library's own code."""
    if isinstance(error, SyntaxError):
        return ""
    frames = traceback.extract_tb(error.__traceback__)
    import verifiers

    library = (str(Path(verifiers.__file__).parent), "<frozen", str(Path(__file__).parent))
    own = [frame for frame in frames if not frame.filename.startswith(library)]
    return f" ({own[-1].filename}:{own[-1].lineno})" if own else ""


def check_type_parameters(asked: str, *classes: type) -> None:
    """PluginError for a class whose type parameter is a name in quotes: the library would not find the class that it names, and
    use its own base class, which has no rewards."""
    for klass in classes:
        for parent in klass.__mro__:
            for base in getattr(parent, "__orig_bases__", ()):
                for parameter in get_args(base):
                    if isinstance(parameter, ForwardRef | str):
                        name = parameter if isinstance(parameter, str) else parameter.__forward_arg__
                        raise PluginError(
                            f'{asked}: the type parameter "{name}" of {parent.__name__} is a name in quotes, which '
                            f"verifiers does not find: tasks would have no rewards. Define {name} above "
                            f"{parent.__name__}, and write it without quotes."
                        )


def check_tasks(tasks: Sequence[vf.Task[Any, Any, Any]], taskset: vf.Taskset[Any, Any], asked: str) -> None:
    """PluginError if a task is not of the types that its taskset declares. The environment rebuilds tasks as these."""
    kind = type(taskset).task_type()
    declared = (kind, kind.data_type())
    for number, task in enumerate(tasks):
        found = (type(task), type(task.data))
        if found != declared:
            raise PluginError(
                f"{asked}: task {number} is {found[0].__name__} with {found[1].__name__}, but "
                f"{type(taskset).__name__} declares {declared[0].__name__} with {declared[1].__name__}. Tasks are rebuilt as "
                f"declared, without rewards and fields of their own. Write class "
                f"{type(taskset).__name__}(vf.Taskset[{found[0].__name__}, ...]) and class "
                f"{found[0].__name__}(vf.Task[{found[1].__name__}, ...])."
            )


def modules_in(folder: str) -> list[str]:
    import pkgutil

    return sorted(module.name for module in pkgutil.iter_modules([folder]))


def module_of(name: str) -> str:
    """The module of an id such as `gsm8k` or `owner/gsm-8k@1.0`."""
    return name.rsplit("/", 1)[-1].split("@")[0].replace("-", "_").lower()


def ids(table: Mapping[str, Any]) -> list[str]:
    """All ids in the table: of the taskset, the environment, and the harnesses of agents."""
    found = [table["id"]] if isinstance(table.get("id"), str) else []
    for value in table.values():
        if isinstance(value, Mapping):
            found += ids(value)
    return found


def installed() -> list[str]:
    """The distributions that require verifiers, as packages of environments do, and the library's own tasksets."""
    import pkgutil

    import verifiers.v1.tasksets

    own = [module.name for module in pkgutil.iter_modules(verifiers.v1.tasksets.__path__)]
    others = {dist.name for dist in importlib.metadata.distributions() if "verifiers" in needs(dist)}
    return sorted(others) + own


def needs(dist: importlib.metadata.Distribution) -> set[str]:
    """Canonical names of its requirements without extras."""
    names = set()
    for text in dist.requires or ():
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            names.add(canonicalize_name(requirement.name))
    return names

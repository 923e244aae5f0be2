"""Checks that the verifiers library is installed, and loads environments and tasksets from it."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

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
    """The environment's configuration, of its own type. PluginError if there is no such taskset or environment, ConfigError if
    its options are invalid."""
    import verifiers.v1 as vf

    return _loaded(lambda: vf.resolve_env_config(dict(table)), table, "generate.env", folder)


def load_taskset(table: Mapping[str, Any], folder: str | None) -> vf.Taskset[Any, Any]:
    """Loads the taskset of `data.taskset`. Errors as in `load_environment`."""
    import verifiers.v1 as vf

    def load() -> vf.Taskset[Any, Any]:
        return vf.load_taskset(vf.taskset_config_type(table["id"]).model_validate(dict(table)))

    return _loaded(load, {"taskset": table}, "data", folder)


def _loaded(load: Any, table: Mapping[str, Any], where: str, folder: str | None) -> Any:
    from pydantic import ValidationError

    if folder is not None and folder not in sys.path:
        # Appended: it must not hide installed packages.
        sys.path.append(folder)
    asked = f'{where}.taskset = "{table["taskset"]["id"]}"' + (
        f', {where}.id = "{table["id"]}"' if "id" in table else ""
    )
    # Importing a module and making its taskset runs its author's code.
    with foreign(asked, "load"):
        try:
            return load()
        except ValidationError as error:
            raise ConfigError(
                [f"{where}.{'.'.join(map(str, found['loc']))}: {found['msg']}" for found in error.errors()]
            ) from error
        except ModuleNotFoundError as error:
            missing = error.__cause__.name if isinstance(error.__cause__, ModuleNotFoundError) else error.name
            named = {str(one).rsplit("/", 1)[-1].split("@")[0].replace("-", "_").lower() for one in ids(table)}
            if missing is not None and missing not in named:
                raise PluginError(f"{asked}: it requires {missing}, which is not installed. Install it.") from error
            there = ", ".join(installed()) or "no package that requires verifiers"
            raise PluginError(
                f"{asked}: there is no such module. Installed: {there}. Install the environment's package, or set "
                f"{where}.folder to the folder of its module."
            ) from error
        except (AttributeError, TypeError, ValueError) as error:
            # The library raises these for a module that is no taskset.
            raise PluginError(f"{asked}: {error}") from error


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

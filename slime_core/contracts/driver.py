"""Driver: the class behind an entry point. It holds metadata and a Config; only `build` imports heavy libraries."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from pydantic.fields import FieldInfo

from slime_core import API_VERSION
from slime_core.contracts.table import Table

if TYPE_CHECKING:
    from slime_core.contracts.example import Example

T_co = TypeVar("T_co", covariant=True)


class DriverConfig(Table):
    """Base of every plugin's options."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch:
    """A library function that a plugin replaces while a run uses it. No file is changed."""

    target: str
    """`package.module.Class.method`."""
    purpose: str
    when: str
    """Which runs apply the patch."""
    found: bool
    """True if the installed library has the target; if False, the patch is not applied."""


@dataclass(frozen=True, kw_only=True)
class TableOptions:
    """Keys of an option that is a table, where they depend on the installed library."""

    option: str
    prefix: str
    """Prefix of the flags: `router-` for `--router-max-concurrent-requests`."""
    fields: Mapping[str, FieldInfo]
    """By key."""


class Driver(ABC, Generic[T_co]):
    """A named choice. Subclasses set `Config` and implement `build`; the class itself is never instantiated.

    The module that defines a driver imports neither torch nor the library of an engine or launcher: listing plugins and
    checking a config must stay fast, and workers resolve the same driver again by name.
    """

    api_version: ClassVar[int] = API_VERSION
    noun: ClassVar[str] = ""
    """Name in messages, where its entry-point group holds several kinds of driver."""
    Config: ClassVar[type[DriverConfig]] = DriverConfig
    flag_aliases: ClassVar[Mapping[str, str]] = {}
    """Other flag names of options, without leading dashes: `{"rollout-model": "model"}` makes `--rollout-model` set `model`.
    They work only while the plugin is chosen, and have no prefix."""

    @classmethod
    def table_options(cls) -> Sequence[TableOptions]:
        """Keys that options of table type may hold, for flags and listings; the plugin itself checks their values."""
        return ()

    @classmethod
    @abstractmethod
    def build(cls, config: Any) -> T_co:
        """Builds the object of the contract. config: an instance of `cls.Config`. Heavy imports happen here."""

    @classmethod
    def notices(cls, config: Any) -> Sequence[str]:
        """Sentences on options that are set and have no effect, or another name now. The command prints each once."""
        return ()

    @classmethod
    def patches(cls) -> Sequence[Patch]:
        """All patches of the plugin, for the listing."""
        return ()

    @classmethod
    def examples(cls, folder: Path) -> Sequence[Example]:
        """Examples for the contract kit (`slime_core.contracts.example`). folder: an empty folder for files of an example."""
        return ()

"""Driver: what an entry point names. It holds metadata and a Config and imports nothing heavy; `build` does that."""

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
    """A function of the library behind a plugin that behaves otherwise while a run uses it. No file is changed."""

    target: str
    """`package.module.Class.method`."""
    purpose: str
    when: str
    """Which runs have it."""
    found: bool
    """The installed library has the target; without it the run lacks the purpose."""


@dataclass(frozen=True, kw_only=True)
class TableOptions:
    """Keys of a table that is an option, known only from what is installed."""

    option: str
    prefix: str
    """Of the flags: `router-` for `--router-max-concurrent-requests`."""
    fields: Mapping[str, FieldInfo]
    """By key."""


class Driver(ABC, Generic[T_co]):
    """A named choice. Subclasses set `Config` and implement `build`; the class itself is never instantiated.

    The module that defines a driver imports neither torch nor the library of an engine or launcher: listing plugins and
    checking a config must stay fast, and workers resolve the same driver again by name.
    """

    api_version: ClassVar[int] = API_VERSION
    noun: ClassVar[str] = ""
    """What messages call it, where its group holds several kinds of driver."""
    Config: ClassVar[type[DriverConfig]] = DriverConfig
    flag_aliases: ClassVar[Mapping[str, str]] = {}
    """Options by the names that their flags have elsewhere, without dashes in front: `--rollout-model` for `{"rollout-model":
    "model"}`. They are understood while the plugin is chosen, and have no prefix."""

    @classmethod
    def table_options(cls) -> Sequence[TableOptions]:
        """What the options that are tables may hold, for flags and listings; the plugin itself checks what they do."""
        return ()

    @classmethod
    @abstractmethod
    def build(cls, config: Any) -> T_co:
        """The object of the contract. `config` is an instance of `cls.Config`; heavy imports happen here."""

    @classmethod
    def patches(cls) -> Sequence[Patch]:
        """Everything that it patches, for the listing."""
        return ()

    @classmethod
    def examples(cls, folder: Path) -> Sequence[Example]:
        """What the contract kit tries the plugin on, with answers worked out by hand. Files that an example needs are
        written into `folder`, which is empty. See `slime_core.contracts.example`."""
        return ()

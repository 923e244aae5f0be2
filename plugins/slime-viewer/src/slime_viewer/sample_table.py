"""SampleTable: the numbers of all samples of a set in DuckDB, and the samples that a search, a filter and an order choose."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import duckdb
import pyarrow as pa

from slime_core.errors import ConfigError
from slime_viewer.conditions import quoted, unknown_column, where_clause
from slime_viewer.sample_index import PLACES, StepIndex
from slime_viewer.sample_numbers import COUNT, PART
from slime_viewer.sample_texts import Candidates, SampleTexts, uids_of
from slime_viewer.search_words import SearchWords

MEMORY: Final = "300MB"
READ_ALL: Final = 200_000
"""Above so many candidates of a search, the total is estimated from the first ones."""
READ_FIRST: Final = 4_000

SORTS: Final = {
    "step": "step", "group": "group", "index": "index", "reward": "reward", "tokens": "tokens", "trained": "trained",
    "version": "oldest", "log_prob": "log_prob", "advantage": "advantage", "mismatch": "mismatch", "entropy": "entropy",
}  # fmt: skip
"""What samples are sorted by, and its column."""
AMONG_EQUAL: Final = "advantage DESC NULLS LAST, "
"""Of equal rewards those come first that teach most: a wrong response among right ones before one among wrong ones."""
GROUP_SORTS: Final = (
    "group", "samples", "oldest", "newest",
    "reward", "lowest", "highest", "spread", "tokens", "longest", "truncated", "version", "advantage",
    "mismatch", "entropy",
)  # fmt: skip
ALSO_FILTERS: Final = ("oldest", "newest", "status", "part")
"""What samples are filtered by, beside SORTS."""


NO_WORDS: Final = SearchWords(())


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What the page asks of samples or groups."""

    step: int | None = None
    """None: of all."""
    group: int | None = None
    words: SearchWords = NO_WORDS
    where: str = ""
    sort: str
    descending: bool = False
    offset: int = 0
    limit: int = 100


@dataclass(frozen=True, slots=True)
class Chosen:
    """A page of rows."""

    total: int
    exact: bool
    """False: `total` is an estimate, since counting would have read too many texts."""
    rows: Mapping[str, list[Any]]
    """Columns of the page."""
    texts: list[tuple[str, str]]
    """Prompt and response of each row."""


class SampleTable:
    """Samples of the steps that were added. Threads may read and add."""

    def __init__(self) -> None:
        # Nothing is loaded from elsewhere.
        config: dict[str, Any] = {"autoinstall_known_extensions": False, "autoload_known_extensions": False}
        self._database = duckdb.connect(":memory:", config={"memory_limit": MEMORY, **config})
        self._consistent = threading.RLock()
        """Rows and the files of their texts belong together."""
        self._texts = SampleTexts(self._database)
        self._columns: tuple[str, ...] = ()

    @property
    def rows(self) -> int:
        return self._texts.rows

    def names(self, prefix: str) -> list[str]:
        """Of reward parts (PART) or counts (COUNT)."""
        return sorted(name.removeprefix(prefix) for name in self._columns if name.startswith(prefix))

    def key_of(self, step: int) -> str | None:
        """The state of the dumps that the step's rows are of; None: it was not added."""
        return self._texts.key_of(step)

    def add(self, indices: Sequence[StepIndex]) -> None:
        """Adds steps, in place of rows that they have already."""
        tables = [index.numbers() for index in indices]
        numbered = [table.append_column("uid", pa.array(uids_of(table))) for table in tables]
        whole = pa.concat_tables(numbered, promote_options="default")
        with self._consistent:
            cursor = self._database.cursor()
            cursor.register("added", whole)
            if not self._columns:
                cursor.execute("CREATE TABLE samples AS SELECT * FROM added LIMIT 0")
                self._columns = tuple(whole.column_names)
            for name in whole.column_names:
                if name not in self._columns:
                    cursor.execute(f"ALTER TABLE samples ADD COLUMN {quoted(name)} DOUBLE")
                    self._columns = (*self._columns, name)
            cursor.execute("BEGIN")
            self._delete(cursor, [index.step for index in indices])
            cursor.execute("INSERT INTO samples BY NAME SELECT * FROM added")
            cursor.execute("COMMIT")
            for index, table in zip(indices, tables, strict=True):
                self._texts.add(index, table)

    def remove(self, steps: Sequence[int]) -> None:
        """Steps whose files are gone."""
        with self._consistent:
            self._delete(self._database.cursor(), steps)
            self._texts.remove(steps)

    def _delete(self, cursor: duckdb.DuckDBPyConnection, steps: Sequence[int]) -> None:
        if there := [step for step in steps if self._texts.key_of(step) is not None]:
            cursor.execute("DELETE FROM samples WHERE step IN (SELECT unnest(?::BIGINT[]))", [there])

    def step_summary(self) -> Mapping[str, list[Any]]:
        """Columns by step: `step`, `samples`, `groups`, `reward`."""
        if not self._columns:
            return {name: [] for name in ("step", "samples", "groups", "reward")}
        query = "SELECT step, count(*) AS samples, count(DISTINCT place) AS groups, avg(reward) AS reward FROM samples"
        return self._page(f"{query} GROUP BY step ORDER BY step", [])

    def samples(self, asked: Asked) -> Chosen:
        """A page of samples. ConfigError for an order or a condition that does not exist."""
        named = {name: name for name in self._columns if name.startswith((PART, COUNT))}
        columns = {**SORTS, **named}
        if asked.sort not in columns:
            raise ConfigError(unknown_column("sort", asked.sort, columns))
        clause, values = where_clause(asked.where, {**columns, **{name: name for name in ALSO_FILTERS}})
        if not self._columns:
            return Chosen(0, True, {}, [])
        conditions, parameters = [clause], list(values)
        for name, value in (("step", asked.step), ("group", asked.group)):
            if value is not None:
                conditions.append(f"{quoted(name)} = ?")
                parameters.append(value)
        equal = AMONG_EQUAL if asked.sort == "reward" else ""
        order = f"{quoted(columns[asked.sort])} {'DESC' if asked.descending else 'ASC'} NULLS LAST, {equal}step, row"
        query = Query(f"FROM samples WHERE {' AND '.join(conditions)}", order, parameters)
        if not asked.words.words:
            return self._chosen(asked, query, self._database.cursor())
        with self._consistent:
            candidates = self._texts.candidates(asked.words, asked.step)
            if candidates.count > READ_ALL and (found := self._first_with_words(asked, query, candidates)) is not None:
                return found
            cursor = self._database.cursor()
            cursor.register("found", self._texts.with_words(asked.words, candidates))
            return self._chosen(asked, query.among("found"), cursor)

    def groups(self, asked: Asked) -> Chosen:
        """A page of a step's groups, with the texts of each one's first sample. Words: groups in which a sample has them."""
        named = [name for name in self._columns if name.startswith((PART, COUNT))]
        known = {name: name for name in (*GROUP_SORTS, *named)}
        if asked.sort not in known:
            raise ConfigError(unknown_column("sort", asked.sort, known))
        clause, values = where_clause(asked.where, known)
        if not self._columns:
            return Chosen(0, True, {}, [])
        means = "".join(f", avg({quoted(name)}) AS {quoted(name)}" for name in named)
        first = ", ".join(f"arg_min({name}, row) AS {name}" for name in PLACES)
        cursor = self._database.cursor()
        among = ""
        if asked.words.words:
            with self._consistent:
                candidates = self._texts.candidates(asked.words, asked.step)
                cursor.register("found", self._texts.with_words(asked.words, candidates))
            among = "AND place IN (SELECT place FROM samples WHERE step = ? AND uid IN (SELECT uid FROM found))"
        groups = (
            'SELECT place, any_value(step) AS step, any_value("group") AS "group", count(*) AS samples, avg(reward) AS reward, '
            "min(reward) AS lowest, max(reward) AS highest, stddev_pop(reward) AS spread, avg(tokens) AS tokens, "
            "max(tokens) AS longest, count(*) FILTER (status = 'truncated') AS truncated, min(oldest) AS oldest, "
            "max(newest) AS newest, min(oldest) AS version, avg(advantage) AS advantage, avg(mismatch) AS mismatch, "
            f"avg(entropy) AS entropy, {first}{means} FROM samples WHERE step = ? {among} GROUP BY place"
        )
        parameters = [*[asked.step] * (2 if among else 1), *values]
        order = f"{quoted(asked.sort)} {'DESC' if asked.descending else 'ASC'} NULLS LAST, place"
        return self._chosen(asked, Query(f"FROM ({groups}) WHERE {clause}", order, parameters), cursor)

    def at(self, index: int, part: int, step: int | None) -> tuple[int, int] | None:
        """Step and row of a sample, of the newest step that has it; None if there is none."""
        if not self._columns:
            return None
        found = self._page(
            'SELECT step, row FROM samples WHERE "index" = ? AND part = ? AND (?::BIGINT IS NULL OR step = ?) '
            "ORDER BY step DESC LIMIT 1",
            [index, part, step, step],
        )
        return (found["step"][0], found["row"][0]) if found["step"] else None

    def place_of(self, step: int, row: int) -> int:
        """A row's place among the samples of its step."""
        found = self._page("SELECT count(*) AS place FROM samples WHERE step = ? AND row < ?", [step, row])
        return int(found["place"][0])

    def index_range(self) -> tuple[int, int] | None:
        """The least and the greatest number of a sample."""
        if not self._columns:
            return None
        found = self._page('SELECT min("index") AS least, max("index") AS most FROM samples', [])
        return None if found["least"][0] is None else (found["least"][0], found["most"][0])

    def _page(self, query: str, parameters: Sequence[Any]) -> dict[str, list[Any]]:
        return columns_of(self._database.cursor().execute(query, parameters))

    def _chosen(self, asked: Asked, query: Query, cursor: duckdb.DuckDBPyConnection) -> Chosen:
        """A page with its texts. `cursor`: has the tables that the query names."""
        total = columns_of(cursor.execute(f"SELECT count(*) AS total {query.source}", query.parameters))["total"][0]
        paged = f"SELECT * {query.source} ORDER BY {query.order} LIMIT ? OFFSET ?"
        with self._consistent:
            page = columns_of(cursor.execute(paged, [*query.parameters, asked.limit, asked.offset]))
            return Chosen(total, True, page, self._texts.of(page))

    def _first_with_words(self, asked: Asked, query: Query, candidates: Candidates) -> Chosen | None:
        """A page of a frequent word, from the first candidates in the asked order. None if they do not fill it."""
        needed = asked.offset + asked.limit
        cursor = self._database.cursor()
        cursor.register("candidates", candidates.table())
        asked_of = query.among("candidates")
        first = cursor.execute(
            f"SELECT uid {asked_of.source} ORDER BY {asked_of.order} LIMIT ?",
            [*asked_of.parameters, 2 * needed + READ_FIRST],
        ).fetchnumpy()["uid"]
        found = self._texts.with_words(asked.words, Candidates.of_uids(first))
        if found.num_rows < needed:
            return None
        there = columns_of(cursor.execute(f"SELECT count(*) AS total {asked_of.source}", asked_of.parameters))["total"][
            0
        ]
        cursor.register("found", found)
        chosen = self._chosen(asked, query.among("found"), cursor)
        exact = len(first) >= there
        return replace(
            chosen, exact=exact, total=found.num_rows if exact else round(there * found.num_rows / len(first))
        )


@dataclass(frozen=True, slots=True)
class Query:
    """Everything of a query but its columns and its limits."""

    source: str
    order: str
    parameters: list[Any]

    def among(self, table: str) -> Query:
        """Only rows whose `uid` the table has."""
        return replace(self, source=f"{self.source} AND uid IN (SELECT uid FROM {table})")


def columns_of(found: duckdb.DuckDBPyConnection) -> dict[str, list[Any]]:
    """A result as a list for each column."""
    names = [str(column[0]) for column in found.description or ()]
    rows = found.fetchall()
    return dict(zip(names, map(list, zip(*rows, strict=True)), strict=True)) if rows else {name: [] for name in names}

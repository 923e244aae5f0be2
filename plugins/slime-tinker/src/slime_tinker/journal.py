"""Journal: what the server has accepted, done and stored, in one SQLite file. What it reported as written is on the disk."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sqlite3
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeVar

from slime_core.errors import DataError, StorageError
from slime_core.registry.boundary import held
from slime_tinker.models import ModelSpec
from slime_tinker.notes import note
from slime_tinker.records import CheckpointRecord, ModelRecord, Outcome, RequestRecord, SamplerRecord, SessionRecord

Record: TypeAlias = SessionRecord | ModelRecord | CheckpointRecord | SamplerRecord
RecordT = TypeVar("RecordT", SessionRecord, ModelRecord, CheckpointRecord, SamplerRecord)

VERSION: Final = 1
AGAIN_S: Final = 5.0
"""Between two tries to write what has to be."""
KINDS: Final[dict[type[Any], str]] = {
    SessionRecord: "session",
    ModelRecord: "model",
    CheckpointRecord: "checkpoint",
    SamplerRecord: "sampler",
}
TABLES: Final = """
create table if not exists records (kind text, id text, content text not null, primary key (kind, id)) without rowid;
create table if not exists requests (
    id text primary key, owner text not null, seq integer not null, kind text not null, tenant text not null,
    body blob, created real not null, content blob, is_proto integer, failed integer, done real
);
create index if not exists of_owner on requests (owner, seq);
create index if not exists of_age on requests (done);
"""


@dataclass(frozen=True, slots=True)
class Statement:
    sql: str
    values: tuple[Any, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Write:
    statements: Sequence[Statement]
    lasting: bool
    done: asyncio.Future[None]

    def fail(self, error: BaseException) -> None:
        self.done.set_exception(error)
        # Who waited for it may have gone.
        self.done.exception()


class Journal:
    """Statements of one turn of the event loop, and those that come while others are written, are written together, with one
    sync of the disk, in the order in which they came."""

    def __init__(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._connection = sqlite3.connect(file, check_same_thread=False, isolation_level=None)
            file.chmod(0o600)
            self._connection.execute("pragma journal_mode = wal")
            self._connection.execute("pragma synchronous = full")
            (version,) = self._connection.execute("pragma user_version").fetchone()
            if version not in (0, VERSION):
                raise StorageError(
                    f"{file}: written by another version of slime-tinker ({version}; this one has {VERSION})."
                )
            self._connection.executescript(TABLES)
            self._connection.execute(f"pragma user_version = {VERSION}")
        except sqlite3.Error as error:
            raise StorageError(f"{file}: cannot be used: {error}. Is it on a full or read-only disk?") from None
        self._writer = ThreadPoolExecutor(1, "journal")
        self._pending: list[Write] = []
        self._flush: asyncio.Task[None] | None = None
        self._again = asyncio.Event()
        self._ends = False

    async def write(self, statements: Sequence[Statement], *, lasting: bool = False) -> None:
        """Returns when they are on the disk. StorageError if they cannot be written; `lasting`: they are tried again until they
        can, before all later ones, or the server ends. DataError for a value that the journal cannot hold."""
        write = Write(statements, lasting, asyncio.get_running_loop().create_future())
        self._pending.append(write)
        self._again.set()
        if self._flush is None:
            self._flush = asyncio.create_task(self._written())
        await asyncio.shield(write.done)

    async def _written(self) -> None:
        """Until nothing is pending."""
        fails = False
        while self._pending:
            # What comes in this turn is taken along.
            await asyncio.sleep(0)
            writes, self._pending = self._pending, []
            self._again.clear()
            statements = [statement for write in writes for statement in write.statements]
            with held() as ended:
                await asyncio.get_running_loop().run_in_executor(self._writer, self._apply, statements)
            error = ended.raised
            if error is not None and not isinstance(error, StorageError) and len(writes) > 1:
                # One of them cannot be held; the others, perhaps other tenants', are written.
                await self._one_by_one(writes)
                continue
            if error is None:
                for write in writes:
                    write.done.set_result(None)
                if fails:
                    note("the journal is written again.")
                fails = False
                continue
            waits = isinstance(error, StorageError) and not self._ends
            lasting = [write for write in writes if waits and write.lasting]
            for write in writes:
                if write not in lasting:
                    write.fail(error)
            if lasting:
                if not fails:
                    note(f"{error} New requests are refused, and results wait until it can be.")
                fails = True
                self._pending = [*lasting, *self._pending]
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._again.wait(), AGAIN_S)
        self._flush = None

    async def _one_by_one(self, writes: Sequence[Write]) -> None:
        for place, write in enumerate(writes):
            with held() as ended:
                await asyncio.get_running_loop().run_in_executor(self._writer, self._apply, write.statements)
            if ended.raised is None:
                write.done.set_result(None)
            elif isinstance(ended.raised, StorageError):
                # The disk is full now: in their order, as any others.
                self._pending = [*writes[place:], *self._pending]
                return
            else:
                write.fail(ended.raised)

    def end(self) -> None:
        """What cannot be written fails from now on."""
        self._ends = True
        self._again.set()

    def _apply(self, statements: Sequence[Statement]) -> None:
        connection = self._connection
        try:
            connection.execute("begin")
            for statement in statements:
                connection.execute(statement.sql, statement.values)
            connection.execute("commit")
        except (sqlite3.DataError, OverflowError) as error:
            raise DataError(f"the server's journal cannot hold it: {error}.") from error
        except sqlite3.Error as error:
            raise StorageError(f"the server's journal cannot be written: {error}.") from error
        finally:
            # Also after a value that sqlite cannot hold: the next write, perhaps another tenant's, begins anew.
            if connection.in_transaction:
                connection.rollback()

    async def close(self) -> None:
        self.end()
        while self._flush is not None:
            await self._flush
        self._writer.shutdown()
        self._connection.close()

    def records(self, kind: type[RecordT]) -> Iterator[RecordT]:
        """All that were put and not removed; only before the first write."""
        found = self._connection.execute("select content from records where kind = ? order by id", (KINDS[kind],))
        for (content,) in found.fetchall():
            values = json.loads(content)
            if "spec" in values:
                values["spec"] = ModelSpec(**values["spec"])
            known = {field.name for field in fields(kind)}
            yield kind(**{name: value for name, value in values.items() if name in known})

    async def requests(self, where: str, values: tuple[Any, ...] = ()) -> list[RequestRecord]:
        """In the order in which they are to be run."""
        sql = f"select id, owner, seq, kind, tenant, body, created from requests where {where} order by owner, seq"
        rows = await self._read(sql, values)
        names = [field.name for field in fields(RequestRecord)]
        return [RequestRecord(**dict(zip(names, row, strict=True))) for row in rows]

    async def outcome(self, request_id: str) -> tuple[str, Outcome | None] | None:
        """The tenant and what became of it; None: it is unknown, or its result has expired."""
        sql = "select tenant, content, is_proto, failed, done from requests where id = ?"
        rows = await self._read(sql, (request_id,))
        if not rows:
            return None
        tenant, content, is_proto, failed, done = rows[0]
        if done is None:
            return tenant, None
        return tenant, Outcome(content=content, is_proto=bool(is_proto), failed=bool(failed))

    async def _read(self, sql: str, values: tuple[Any, ...]) -> list[Any]:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._writer, lambda: self._connection.execute(sql, values).fetchall())


def put(record: Record) -> Statement:
    content = json.dumps(asdict(record))
    return Statement("insert or replace into records values (?, ?, ?)", (KINDS[type(record)], record.id, content))


def removed(record: Record) -> Statement:
    return Statement("delete from records where kind = ? and id = ?", (KINDS[type(record)], record.id))


def accepted(request: RequestRecord) -> Statement:
    values = (request.id, request.owner, request.seq, request.kind, request.tenant, request.body, request.created)
    return Statement(
        "insert or ignore into requests (id, owner, seq, kind, tenant, body, created) values (?, ?, ?, ?, ?, ?, ?)",
        values,
    )


def finished(request_id: str, outcome: Outcome) -> Statement:
    return Statement(
        "update requests set content = ?, is_proto = ?, failed = ?, done = ? where id = ?",
        (outcome.content, outcome.is_proto, outcome.failed, time.time(), request_id),
    )


def body_dropped(owner: str, through: int) -> Statement:
    """Bodies that are needed no more to repeat what the model's state does not hold."""
    return Statement(
        "update requests set body = null where owner = ? and seq <= ? and done is not null", (owner, through)
    )


def body_dropped_of(request_id: str) -> Statement:
    return Statement("update requests set body = null where id = ?", (request_id,))


def forgotten(owner: str) -> Statement:
    return Statement("delete from requests where owner = ?", (owner,))


def expired_results(before: float) -> Statement:
    """Results that no client can be waiting for. Bodies that a model still needs stay, and so does the last request that
    a model has run: a restart counts from it."""
    later = (
        "select 1 from requests as later where later.owner = requests.owner and later.seq > requests.seq "
        "and later.done is not null and later.failed = 0"
    )
    return Statement(
        f"delete from requests where done < ? and body is null and (kind = 'asample' or exists ({later}))", (before,)
    )

"""The ledger's SQLite file: schema, transactions with savepoints, and counters that move with them.

Counters live in memory and are written in the same transaction as the rows they count, so that reading them costs
nothing and they can never drift: a failed operation takes its share of both back.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Final

SCHEMA_VERSION: Final = 1

_SCHEMA: Final = """
CREATE TABLE counters (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE facts (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE excluded_problems (problem INTEGER PRIMARY KEY);
CREATE TABLE groups (
    id INTEGER PRIMARY KEY,
    problem INTEGER NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('leased', 'completed', 'assigned', 'trained', 'dropped')),
    fence INTEGER NOT NULL,
    owner TEXT,             -- who holds the lease; NULL: waits to be leased again
    request TEXT,           -- the lease request that it was given to
    reason TEXT,            -- why it is dropped, or uses its batch's slot untrained
    step INTEGER,           -- the step whose batch it belongs to, for ever
    oldest_step INTEGER NOT NULL DEFAULT 0,
    segment INTEGER, offset INTEGER, length INTEGER
);
CREATE INDEX groups_completed ON groups (id) WHERE state = 'completed';
CREATE INDEX groups_requeued ON groups (id) WHERE state = 'leased' AND owner IS NULL;
CREATE INDEX groups_request ON groups (request) WHERE state = 'leased';
CREATE INDEX groups_step ON groups (step, id) WHERE step IS NOT NULL;
CREATE INDEX groups_segment ON groups (segment) WHERE segment IS NOT NULL;
CREATE TABLE evaluation_groups (
    id INTEGER PRIMARY KEY,
    problem INTEGER NOT NULL,
    fence INTEGER NOT NULL,
    owner TEXT,
    request TEXT,
    outcome TEXT            -- JSON of its rewards and parts; NULL while it is not done
);
"""


class LedgerDamagedError(Exception):
    """The data directory cannot be used; the message says why and what to do."""


class Database:
    """One connection, used by one thread at a time."""

    def __init__(self, path: Path) -> None:
        """Open or make the file.

        Raises:
            LedgerDamagedError: it is no such database, or one of another version.
        """
        self.path = path
        self.sql = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=30)
        try:
            self.sql.execute("PRAGMA journal_mode = WAL")
            self.sql.execute("PRAGMA synchronous = FULL")
            version = int(self.sql.execute("PRAGMA user_version").fetchone()[0])
            if version == 0:
                self.sql.executescript(f"BEGIN IMMEDIATE;{_SCHEMA}PRAGMA user_version = {SCHEMA_VERSION};COMMIT;")
            elif version != SCHEMA_VERSION:
                raise LedgerDamagedError(
                    f"{path} has layout {version}, this program reads {SCHEMA_VERSION}: "
                    "use the program that wrote it, or a fresh data directory"
                )
            self._load()
        except sqlite3.DatabaseError as error:
            self.sql.close()
            raise LedgerDamagedError(f"{path} is not a usable ledger: {error}") from error
        except LedgerDamagedError:
            self.sql.close()
            raise

    def _load(self) -> None:
        self.counts: dict[str, int] = dict(self.sql.execute("SELECT name, value FROM counters").fetchall())
        self.facts: dict[str, str] = dict(self.sql.execute("SELECT name, value FROM facts").fetchall())
        self._stored_counts = dict(self.counts)
        self._stored_facts = dict(self.facts)

    def count(self, name: str) -> int:
        """A counter's value; 0 when it was never touched."""
        return self.counts.get(name, 0)

    def add(self, name: str, amount: int = 1) -> None:
        """Raise (or lower) a counter inside the running transaction."""
        self.counts[name] = self.counts.get(name, 0) + amount

    def put(self, name: str, value: int) -> None:
        """Set a counter inside the running transaction."""
        self.counts[name] = value

    @contextlib.contextmanager
    def savepoint(self) -> Iterator[None]:
        """Run one operation; when it raises, what it wrote and counted is taken back and the transaction goes on."""
        counts, facts = dict(self.counts), dict(self.facts)
        self.sql.execute("SAVEPOINT operation")
        try:
            yield
        except BaseException:
            self.sql.execute("ROLLBACK TO operation")
            self.sql.execute("RELEASE operation")
            self.counts, self.facts = counts, facts
            raise
        self.sql.execute("RELEASE operation")

    def begin(self) -> None:
        """Begin a transaction."""
        self.sql.execute("BEGIN IMMEDIATE")

    def commit(self) -> None:
        """Write the counters that moved and make the transaction durable."""
        _store(self.sql, "counters", self.counts, self._stored_counts)
        _store(self.sql, "facts", self.facts, self._stored_facts)
        self.sql.execute("COMMIT")
        self._stored_counts, self._stored_facts = dict(self.counts), dict(self.facts)

    def rollback(self) -> None:
        """Take the whole transaction back."""
        if self.sql.in_transaction:
            self.sql.execute("ROLLBACK")
        self._load()

    def close(self) -> None:
        """Fold the write-ahead log into the file and close it."""
        self.sql.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        self.sql.close()


def _store(sql: sqlite3.Connection, table: str, values: dict[str, int] | dict[str, str], stored: object) -> None:
    assert isinstance(stored, dict)
    changed = [(name, value) for name, value in values.items() if stored.get(name) != value]
    if changed:
        sql.executemany(f"INSERT OR REPLACE INTO {table} (name, value) VALUES (?, ?)", changed)  # noqa: S608

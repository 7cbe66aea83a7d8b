"""Log lines: for people, or one JSON object per line, each with the job it is about; never with a token.

Nothing here or in Kopf logs a token on purpose. That they are masked is the second line of defence, for an error's
text or an object that somebody prints.
"""

from __future__ import annotations

import contextlib
import json as jsonlib
import logging
import re
import sys
from collections.abc import Iterator
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, Final, TextIO

MASK: Final = "***"
LEVELS: Final = ("DEBUG", "INFO", "WARNING", "ERROR")
QUIET: Final = {
    "kubernetes": logging.INFO,
    "aiohttp.access": logging.WARNING,
    "kopf.objects": logging.WARNING,
    "kopf.activities": logging.WARNING,
}
"""Loggers that never say more than this. At DEBUG the Kubernetes client prints every answer, Secrets included; Kopf has
a line for each event that it handled."""
JOB_KIND: Final = "RLTrainingJob"

_job: ContextVar[str] = ContextVar("job", default="")
_BEARER: Final = re.compile(r"(Bearer\s+|(?i:bearer)\s+(?=[\w.~+/=-]{16}))[^\s\"',;)}\]\\]+")
_AFTER_TOKEN: Final = re.compile(
    r"(token\\{0,4}[\"']?\s{0,4}[:=]\s{0,4})(?:(b?\\{0,4}[\"'])[^\"'\\\n]+|[\w.~+/=-]{16,})", re.IGNORECASE
)
_SHAPES: Final = re.compile(r"\b(?:hf_[A-Za-z0-9]{16,}|eyJ[\w-]{10,2000}\.[\w-]{10,2000}\.[\w-]+)")
"""Tokens of the model hub, and signed ones (JWT) as service accounts have them."""


def configure(level: str = "INFO", json: bool = False, stream: TextIO | None = None) -> None:
    """Send all log lines of this process, those of Kopf and of libraries too, to one place in one form.

    Args:
        level: the least that is shown, one of :data:`LEVELS`.
        json: one JSON object per line instead of text.
        stream: where to; stderr unless given.

    Raises:
        ValueError: there is no such level.
    """
    if level.upper() not in LEVELS:
        raise ValueError(f"log level {level!r} is none of {', '.join(LEVELS)}")
    handler = logging.StreamHandler(stream if stream is not None else sys.stderr)
    handler.addFilter(_about)
    handler.setFormatter(_JsonFormatter() if json else _TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    logging.captureWarnings(True)
    for name, least in QUIET.items():
        logging.getLogger(name).setLevel(max(least, root.level))


@contextlib.contextmanager
def job_context(key: str) -> Iterator[None]:
    """Name the job (``namespace/name``) in every line logged in the block, and in the tasks started in it."""
    before = _job.set(key)
    try:
        yield
    finally:
        _job.reset(before)


def mask(text: str) -> str:
    """Take out what follows ``Bearer``, what looks secret after a key that ends in ``token``, and known forms."""
    text = _BEARER.sub(rf"\1{MASK}", text)
    return _SHAPES.sub(MASK, _AFTER_TOKEN.sub(rf"\1\2{MASK}", text))


def _about(record: logging.LogRecord) -> bool:
    """Note which job a record is about; lines of Kopf's own about an object name it themselves."""
    job, other = _job.get(), ""
    reference = getattr(record, "k8s_ref", None)
    if isinstance(reference, dict):
        address = "/".join(str(reference[part]) for part in ("namespace", "name") if reference.get(part))
        if reference.get("kind") == JOB_KIND:
            job = job or address
        else:
            other = f"{reference.get('kind')} {address}"
    record.__dict__.update(job=job, object=other)
    return True


class _Formatter(logging.Formatter):
    """What both forms share: UTC, a message whatever the arguments, and masking."""

    def message(self, record: logging.LogRecord) -> str:
        try:
            return mask(record.getMessage())
        except Exception:  # a wrong format string must not cost the line
            return mask(f"{record.msg} {record.args!r}")

    def trace(self, record: logging.LogRecord) -> str:
        parts = [self.formatException(record.exc_info)] if record.exc_info and record.exc_info[0] else []
        return mask("\n".join([*parts, *([self.formatStack(record.stack_info)] if record.stack_info else [])]))

    @staticmethod
    def time(record: logging.LogRecord) -> str:
        return datetime.fromtimestamp(record.created, UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"


class _JsonFormatter(_Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": self.time(record),
            "level": record.levelname,
            "logger": record.name,
            "message": self.message(record),
        }
        more = {"job": getattr(record, "job", ""), "object": getattr(record, "object", "")}
        line |= {name: value for name, value in more.items() if value}
        if trace := self.trace(record):
            line["exception"] = trace
        return jsonlib.dumps(line)


class _TextFormatter(_Formatter):
    def format(self, record: logging.LogRecord) -> str:
        about = " ".join(part for part in (getattr(record, "job", ""), getattr(record, "object", "")) if part)
        where = f"{record.name} [{about}]" if about else record.name
        # Indented, so that nothing in a message can pass for a line of its own.
        message = self.message(record).replace("\n", "\n    ")
        line = f"{self.time(record)} {record.levelname:<7} {where}: {message}"
        trace = self.trace(record)
        return f"{line}\n{trace}" if trace else line

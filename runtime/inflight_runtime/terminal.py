"""What the views of a local run and of a job in a cluster have in common on a terminal."""

from __future__ import annotations

from typing import Final

from rich.console import Console
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from inflight_runtime.local.text import clean_line, clock_text

COLOURS: Final = ("cyan", "green", "magenta", "yellow", "blue", "bright_cyan", "bright_green", "bright_magenta")


def progress_bar(step: int, steps: int, left_s: float | None) -> Table:
    """How far a run is.

    Args:
        step: optimizer steps done.
        steps: optimizer steps wanted; 0 when that is not known yet.
        left_s: seconds to the end, as far as that can be told.
    """
    grid = Table.grid(padding=(0, 1), expand=True)
    grid.add_column(ratio=1)
    grid.add_column(no_wrap=True)
    share = f"{step / steps:.0%}" if steps else ""
    left = f"  {clock_text(left_s)} left" if left_s is not None else ""
    grid.add_row(ProgressBar(total=max(steps, 1), completed=step), f"step {step}/{steps}  {share}{left}")
    return grid


class PrefixedLines:
    """Writes lines of several sources side by side, each with its source in front, in colour on a terminal.

    Args:
        console: where to.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._prefixes: dict[str, str] = {}

    def line(self, source: str, text: str) -> None:
        """Write one line."""
        if source not in self._prefixes:
            self._prefixes[source] = self._prefix(source)
        self._console.file.write(f"{self._prefixes[source]}{clean_line(text)}\n")

    def flush(self) -> None:
        """Let out what has been written."""
        self._console.file.flush()

    def _prefix(self, source: str) -> str:
        # Made once for each source: rich would take longer for a line than the rest of the way.
        with self._console.capture() as made:
            self._console.print(Text(f"{source} | ", COLOURS[len(self._prefixes) % len(COLOURS)]), end="")
        return made.get()

"""Measurements as markdown: tables, and reports that say when, on what and how they were made.

A report is written anew with each row, so that a run that is cut short leaves what it had.
"""

import re
import shlex
import time
from collections.abc import Sequence
from pathlib import Path


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, num_words: int = 1) -> str:
    """A markdown table, columns padded so that it reads as text, too; the first `num_words`
    columns hold words, the others numbers.
    """
    cells = [[cell.replace("|", "/") for cell in row] for row in (header, *rows)]
    widths = [max(3, *(len(row[column]) for row in cells)) for column in range(len(header))]
    lines = [_line(row, widths, num_words) for row in cells]
    rule = ["-" * width for width in widths]
    rule[num_words:] = [dashes[:-1] + ":" for dashes in rule[num_words:]]
    return "\n".join([lines[0], "| " + " | ".join(rule) + " |", *lines[1:]])


def number(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def share(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def one_line(text: str, most: int = 160) -> str:
    """The text on one line, cut to `most` characters."""
    line = " ".join(text.split())
    return line if len(line) <= most else line[: most - 3] + "..."


class Report:
    """A markdown file DIR/<date>-<device>-<name>.md, or none if there is no directory."""

    def __init__(self, title: str, name: str, folder: Path | None, command: Sequence[str]) -> None:
        self._title = title
        self._name = name
        self._folder = folder
        self._command = shlex.join(command)
        self._date = time.strftime("%Y-%m-%d")

    def write(self, device: str, facts: Sequence[str], body: str) -> Path | None:
        """Replace the file's contents; its path."""
        if self._folder is None:
            return None
        self._folder.mkdir(parents=True, exist_ok=True)
        slug = re.sub(r"[^a-z0-9]+", "-", device.split("(")[0].lower()).strip("-")
        path = self._folder / f"{self._date}-{slug}-{self._name}.md"
        path.write_text(self.text(device, facts, body) + "\n")
        return path

    def text(self, device: str, facts: Sequence[str], body: str) -> str:
        lines = [f"# {self._title}", "", f"{self._date}, {device}. {'. '.join(facts)}."]
        return "\n".join([*lines, "", f"Command: `{self._command}`", "", body])


def _line(row: Sequence[str], widths: Sequence[int], num_words: int) -> str:
    cells = [
        cell.ljust(width) if column < num_words else cell.rjust(width)
        for column, (cell, width) in enumerate(zip(row, widths, strict=True))
    ]
    return "| " + " | ".join(cells) + " |"

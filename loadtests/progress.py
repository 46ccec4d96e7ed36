# SPDX-License-Identifier: Apache-2.0
"""The progress of a comparison: a bar and a line on a terminal, or lines every few seconds in a log."""

import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

LOG_S = 10


class Reporter:
    """Shows progress through a number of steps.

    Args:
        steps: the number of loads over all backends, rounds, scenarios and levels.
    """

    def __init__(self, console: Console, steps: int) -> None:
        self.console, self.steps, self.finished = console, steps, 0
        self.began = self.said = time.monotonic()
        columns = (BarColumn(30), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
        self.progress = Progress(*columns, console=console, disable=not console.is_terminal)
        self.task = self.progress.add_task("", total=steps)

    def __enter__(self) -> "Reporter":
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def say(self, text: str) -> None:
        """Prints a line."""
        self.said = time.monotonic()
        line = f"[{self.said - self.began:6.1f} s, {self.finished}/{self.steps}] {text}"
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def status(self, text: str) -> None:
        """Shows the current activity: on a terminal it replaces the previous text, in a log it is printed sometimes."""
        if self.console.is_terminal:
            self.progress.update(self.task, description=text.replace("[", r"\["))
        elif time.monotonic() - self.said >= LOG_S:
            self.say(text)

    def step(self, count: int = 1) -> None:
        self.finished += count
        self.progress.update(self.task, completed=self.finished)

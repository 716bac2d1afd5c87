"""Lines on the console; on a terminal a progress bar below them, in a log file nothing but the lines."""

import sys
from contextlib import suppress
from typing import Any


class Console:
    """Speaks on the first rank only."""

    def __init__(self, steps: int, *, speaks: bool):
        self._speaks = speaks
        self._bar = _progress_bar(steps) if speaks and sys.stdout.isatty() else None

    def line(self, text: str) -> None:
        if self._bar is not None:
            self._bar.write(text)
        elif self._speaks:
            with suppress(BrokenPipeError):  # whoever read this has died; that must not end a run that can still save
                print(text, flush=True)  # at once: whoever follows a log file waits for this line

    def advance(self, steps: int = 1) -> None:
        """Steps have ended."""
        if self._bar is not None:
            self._bar.update(steps)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def _progress_bar(steps: int) -> Any:
    try:
        from tqdm import tqdm
    except ImportError:  # an extra; the lines say it all
        return None
    return tqdm(total=steps, unit="step", leave=False)

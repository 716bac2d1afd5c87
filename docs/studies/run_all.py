"""Runs the studies and puts what they print into their places in README.md.

`python docs/studies/run_all.py [NAME ...]`: all of them, or those named. A place is what stands between the lines
`<!-- NAME -->` and `<!-- end of NAME -->`. Figures are drawn by the studies themselves.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
PAGE = FOLDER / "README.md"


def studies() -> list[str]:
    """The names of all studies, as the page has places for them."""
    return re.findall(r"^<!-- end of (\w+) -->$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)


def put(page: str, name: str, text: str) -> str:
    """The page with `text` in the place of study `name`."""
    first, last = f"<!-- {name} -->\n", f"<!-- end of {name} -->\n"
    before, _, rest = page.partition(first)
    _, found, after = rest.partition(last)
    if not found:
        raise ValueError(f"README.md has no place for {name}; write the lines {first.strip()} and {last.strip()}")
    return f"{before}{first}\n{text.strip()}\n\n{last}{after}"


def main(names: list[str]) -> None:
    known = studies()
    if unknown := [name for name in names if name not in known]:
        fix = f"write some of {', '.join(known)}, or none for all"
        sys.exit(f"run_all.py: there is no study {', '.join(unknown)}; {fix}")
    for name in names or known:
        print(name, file=sys.stderr, flush=True)
        printed = subprocess.run([sys.executable, str(FOLDER / f"{name}.py")], stdout=subprocess.PIPE, check=True)
        PAGE.write_text(put(PAGE.read_text(encoding="utf-8"), name, printed.stdout.decode()), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])

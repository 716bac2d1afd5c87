"""Run the studies and write what they print to figures/NAME.txt.

`python docs/studies/run_all.py [NAME ...]`: all of them, or those named. The names stand in the headings of README.md.
Figures are drawn by the studies themselves.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
PAGE = FOLDER / "README.md"


def studies() -> list[str]:
    """Return the names of all studies, by the page's headings."""
    return re.findall(r"^## .* \(`(\w+)`\)$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)


def main(names: list[str]) -> None:
    known = studies()
    if unknown := [name for name in names if name not in known]:
        fix = f"write some of {', '.join(known)}, or none for all"
        sys.exit(f"run_all.py: there is no study {', '.join(unknown)}; {fix}")
    for name in names or known:
        print(name, file=sys.stderr, flush=True)
        printed = subprocess.run([sys.executable, str(FOLDER / f"{name}.py")], stdout=subprocess.PIPE, check=True)
        (FOLDER / f"figures/{name}.txt").write_bytes(printed.stdout)


if __name__ == "__main__":
    main(sys.argv[1:])

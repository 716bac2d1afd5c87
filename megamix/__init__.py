"""megamix: mixed-precision pretraining with FP32 master weights sharded over data-parallel ranks.

The engine is a library, re-exported here; `megamix train CONFIG` runs whole jobs.
"""

import importlib
import pkgutil
import re
import sys
from functools import cache
from typing import Any

from megamix.base.moved import MovedModules
from megamix.mixed_precision.optim import schedules as schedules

sys.meta_path.append(MovedModules)


# A name is imported on its first use: a wrong config file must be answered before the seconds that torch takes to load.
@cache
def _homes() -> dict[str, str]:
    """Return the module of each public name, as `__init__.pyi` lists them. It is data of the package, also in a zip."""
    stub = pkgutil.get_data(__name__, "__init__.pyi")
    assert stub is not None, "only a loader that reads no data answers None"
    lines = re.findall(r"^from (\S+) import (\w+) as", stub.decode(), flags=re.MULTILINE)
    return {name: module for module, name in lines}


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return sorted(_homes())
    if name not in _homes():
        raise AttributeError(f"module 'megamix' has no attribute {name!r}")
    return getattr(importlib.import_module(_homes()[name]), name)

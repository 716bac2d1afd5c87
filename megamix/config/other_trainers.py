"""Say what another trainer's key is called here, by other_trainers.toml, which is read once a key is unknown."""

import tomllib
from functools import cache
from pathlib import Path


@cache
def names() -> dict[str, dict[str, str]]:
    """Return the file's tables: `here`, `remarks` and `instead`, each by the other trainer's name."""
    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def called_here(name: str) -> str | None:
    """Return what to write for another trainer's key, as the end of a message; None: nobody's key is known by it."""
    name = name.lstrip("-").replace("-", "_")
    if name in names()["here"]:
        remark = names()["remarks"].get(name)
        return f"it is {names()['here'][name]} here" + (f" ({remark})" if remark else "")
    return names()["instead"].get(name)


def override_here(name: str, value: str) -> str | None:
    """Return the override that another trainer's flag stands for, if it is one."""
    ours, equals, own_value = names()["here"].get(name, "").replace('"', "").partition(" = ")
    return f"{ours}={own_value if equals else value}" if ours else None

"""The public surface, printed a line each: `python -m tests.surface`. Two versions are compared by diff.

Verbs and their flags, configuration keys with their defaults, the library's exports and their parameters, exit
statuses, and the files of a run.
"""

import contextlib
import inspect
import json
import re
import sys
import tempfile
from pathlib import Path

import megamix
from megamix.cli.verbs import VERBS, _parser
from megamix.config import config_schema
from megamix.launch.exit_status import EXIT_STATUS
from tests.builders import run_on_ranks, tiny_job, write_data


def flags():
    """Yield each verb, and each of its flags and positional arguments."""
    for verb in VERBS:
        (verbs,) = (action for action in _parser([verb.name])._actions if action.dest == "verb")
        yield from _flags(f"megamix {verb.name}", verbs.choices[verb.name])


def _flags(name, parser):
    yield f"verb {name}"
    for action in parser._actions:
        choices = action.choices
        if isinstance(choices, dict):
            for word, below in choices.items():
                yield from _flags(f"{name} {word}", below)
        else:
            known = f" of {', '.join(map(str, choices))}" if choices else ""
            yield f"flag {name} {'/'.join(action.option_strings) or action.dest}{known}"


def keys():
    """Yield each configuration key with its default."""
    schema = config_schema()

    def walk(node, path):
        node = {**schema["$defs"][node["$ref"].rpartition("/")[2]], **node} if "$ref" in node else node
        for other in (*node.get("anyOf", ()), *node.get("oneOf", ()), *node.get("allOf", ())):
            yield from walk(other, path)
        if "items" in node and isinstance(node["items"], dict):
            yield from walk(node["items"], f"{path}[]")
        for name, below in node.get("properties", {}).items():
            where = f"{path}.{name}".lstrip(".")
            yield f"key {where} = {json.dumps(below.get('default', below.get('const', '')))}"
            yield from walk(below, where)

    return walk(schema, "")


def exports():
    """Yield each public name with its parameters."""
    for name in megamix.__all__:
        value = getattr(megamix, name)
        try:
            parameters = inspect.signature(value).parameters.values() if callable(value) else ()
        except ValueError:
            parameters = ()
        yield f"export {name}({', '.join(one.name for one in parameters)})"
        for member in sorted(vars(value)) if isinstance(value, type) else ():
            if not member.startswith("_"):
                yield f"export {name}.{member}"


def files():
    """Yield the files of a run of four updates, digits as #."""
    with tempfile.TemporaryDirectory() as place:
        write_data(Path(place, "data"))
        with contextlib.redirect_stdout(sys.stderr):
            run_on_ranks(tiny_job(Path(place), steps=4, tensorboard=True))
        folder = Path(place, "run")
        names = {re.sub(r"\d+", "#", str(path.relative_to(folder))) for path in folder.rglob("*") if path.is_file()}
        yield from (f"file {re.sub(r'events.out.*', 'events.out.#', name)}" for name in names)


def main():
    statuses = (f"exit status {status}: {state}" for state, status in EXIT_STATUS.items())
    for part in (flags(), keys(), exports(), statuses, files()):
        print(*sorted(set(part)), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

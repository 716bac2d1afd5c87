"""Imports go from a higher layer to a lower one, in no circle, and with no torch in `config` and `cli`. Other rooms,
tests and studies use only the facade of an engine. A public class has a name of its own.
"""

import ast
import re
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "megamix"

# A room is a folder of the package. `__init__` is the facade, which nobody inside imports.
LAYERS = [
    "base",
    "comm settings plugins",
    "config data mixed_precision",
    "checkpoint model",
    "launch parallel",
    "log",
    "train",
    "hf tools",
    "cli",
    "__main__ __init__",
]
LAYER = {room: number for number, rooms in enumerate(LAYERS) for room in rooms.split()}
# Lower by number, yet strangers: only parallel and train bring model and engine together, and config imports no torch.
STRANGERS = {("model", "mixed_precision"), ("config", "comm")}
# The tools in their own order: each imports those of the lines before its own.
TOOLS = ["plan ranks verify.core", "verify.layouts verify.foreign verify.runs bench", "audit doctor"]
LAYER |= {
    f"tools.{tool}": LAYER["tools"] + (1 + line) / 10 for line, tools in enumerate(TOOLS) for tool in tools.split()
}
LAYER["tools.verify"] = LAYER["tools"]  # its `__init__.py`, as that of `tools`, only tells


@cache
def parsed(path):
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def imported(path):
    """Return the dotted name of every import of a file: a module's, with the name that is taken from it."""
    found = []
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = [node.module] if isinstance(node, ast.ImportFrom) else []
            found += [".".join([*module, alias.name]) for alias in node.names]
    return found


def modules(package):
    """Return the package's files by their names behind `megamix.`; "" is the facade."""
    parts = {path.relative_to(package).with_suffix("").parts: path for path in package.rglob("*.py")}
    return {".".join(names).removesuffix("__init__").rstrip("."): path for names, path in parts.items()}


def room_of(name):
    parts = name.split(".")
    depth = (3 if parts[1:2] == ["verify"] else 2) if parts[0] == "tools" else 1
    return ".".join(parts[:depth]) or "__init__"


def violations(package):
    found = set()
    for module, path in modules(package).items():
        here = room_of(module)
        for name in imported(path):
            root, _, rest = name.partition(".")
            there = room_of(rest)
            is_lower = LAYER.get(there, 99) < LAYER[here] and (here, there) not in STRANGERS
            if root == "megamix" and here != there and not is_lower:
                found.add(f"{module} imports {there}")
    return sorted(found)


def circle(package):
    """Return modules of which each imports the next, and the last one the first; none if there are no such."""
    paths, done = modules(package), set()

    def walk(module, above):
        if module in above:
            return above[above.index(module) :]
        names = [name.removeprefix("megamix.") for name in imported(paths[module]) if name.startswith("megamix.")]
        there = {name if name in paths else name.rpartition(".")[0] for name in names} & {*paths} - done
        found = next((it for name in sorted(there) if (it := walk(name, [*above, module]))), [])
        done.add(module)
        return found

    return next((found for module in sorted(paths) if (found := walk(module, []))), [])


def test_imports_go_from_a_higher_layer_to_a_lower_one_and_in_no_circle():
    assert {room_of(module) for module in modules(PACKAGE)} == {*LAYER}
    assert violations(PACKAGE) == []
    assert circle(PACKAGE) == []


# What takes a whole configuration apart, beside `config` itself, the tools and the verbs.
TAKE_APART = "check engine job job_size judge main objects ranks_agree"


def test_a_configuration_is_taken_apart_by_the_job_and_a_job_by_nobody_else():
    whole = {"megamix.config.Config", "megamix.config.config.Config"}
    takers = {f"train.{name}" for name in TAKE_APART.split()}
    for module, path in modules(PACKAGE).items():
        room, found = room_of(module), {*imported(path)}
        may = room in ("config", "cli") or room.startswith("tools") or module in takers
        assert may or not whole & found, module
        assert room == "train" or "megamix.train.job.Job" not in found, module


def test_the_design_page_draws_the_rooms_as_they_are():
    page = (ROOT / "docs/design.md").read_text()
    rows = re.findall(r"^\| (\d+) \| ((?:`\w+`(?:, )?)+) \|", page, flags=re.MULTILINE)
    told = {room: int(layer) for layer, rooms in rows for room in re.findall(r"`(\w+)`", rooms)}
    assert told == {room: layer for room, layer in LAYER.items() if not room.startswith(("__", "tools."))}


@pytest.mark.parametrize(
    ("file", "line", "want"),
    [
        ("config/a.py", "import megamix.comm.topology", "config.a imports comm"),
        ("comm/a.py", "from megamix import data", "comm.a imports data"),
        ("mixed_precision/a.py", "def f():\n    from megamix.model import gpt", "mixed_precision.a imports model"),
        ("train/a.py", "import megamix", "train.a imports __init__"),
        ("train/a.py", "from megamix.unheard import x", "train.a imports unheard"),
        ("train/a.py", "from megamix.tools import ranks", "train.a imports tools.ranks"),
        ("tools/bench/a.py", "from megamix.tools.doctor import cards", "tools.bench.a imports tools.doctor"),
        ("tools/verify/core/a.py", "import megamix.tools.verify.runs", "tools.verify.core.a imports tools.verify.runs"),
        (
            "tools/verify/runs/a.py",
            "import megamix.tools.verify.layouts",
            "tools.verify.runs.a imports tools.verify.layouts",
        ),
        ("hf/a.py", "from megamix.cli import hf", "hf.a imports cli"),
        ("train/a.py", "from megamix.mixed_precision import engine\nfrom megamix.train import b", ""),
        ("cli/a.py", "from megamix.tools import bench\nfrom megamix.cli import hf", ""),
        ("comm/a.py", "from megamixer import data", ""),
    ],
)
def test_planted_violation_is_found(tmp_path, file, line, want):
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text(f"import torch\n{line}\n")
    assert violations(tmp_path) == ([want] if want else [])


@pytest.mark.parametrize(
    "line", ["import megamix.data.b", "from megamix.data import b", "def f():\n    import megamix.data.b"]
)
def test_planted_circle_is_found(tmp_path, line):
    (tmp_path / "data").mkdir()
    (tmp_path / "data/a.py").write_text(f"{line}\n")
    (tmp_path / "data/b.py").write_text("from megamix.data.c import x, y\n")
    (tmp_path / "data/c.py").write_text("from megamix.data import a\n")
    assert circle(tmp_path) == ["data.a", "data.b", "data.c"]


def test_config_and_cli_load_no_torch_and_no_numpy_and_settings_no_pydantic_either():
    settings = [*(PACKAGE / "settings").glob("*.py")]
    names = [*(PACKAGE / "config").glob("*.py"), *(PACKAGE / "cli").glob("*.py")]
    for path in {*names, PACKAGE / "__main__.py", *settings} - {PACKAGE / "cli/pretrain.py"}:  # which counts GPUs
        heavy = {"torch", "numpy", "safetensors", "tokenizers"}
        heavy |= {"pydantic", "pydantic_core"} if path in settings else set()
        assert {name.partition(".")[0] for name in imported(path)} & heavy == set(), path


def test_a_stage_of_a_step_imports_no_later_one_and_what_it_tells_none():
    drawn = ast.get_docstring(parsed(PACKAGE / "mixed_precision/__init__.py"))
    stages = re.findall(r"^(\w+)  ", drawn, flags=re.MULTILINE)
    assert len(stages) >= 15
    for number, stage in enumerate(stages):
        room = PACKAGE / "mixed_precision"
        for path in [*room.glob(f"{stage}.py"), *room.glob(f"{stage}/*.py")]:
            names = [name.split(".") for name in imported(path) if name.startswith("megamix.mixed_precision.")]
            later = {*stages[number:]} - ({stage} if path.parent != room else set())
            assert [name for name in names if name[2] in later] == [], path
    told = [name for name in imported(PACKAGE / "mixed_precision/step.py") if name.startswith("megamix.")]
    assert all(name.startswith("megamix.base.") for name in told)


def test_a_public_class_name_exists_once():
    files = defaultdict(list)
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                files[node.name].append(path.name)
    assert len(files) > 100
    assert {name: places for name, places in files.items() if len(places) > 1} == {}


# The engine itself, and where `engine` is something else.
OTHERS = ("megamix/mixed_precision/", "megamix/tools/bench/ranks.py", "megamix/tools/audit/start/sitecustomize.py")


def test_nobody_names_the_inside_of_an_engine():
    found = []
    for path in [path for room in ("megamix", "tests", "docs") for path in (ROOT / room).rglob("*.py")]:
        for node in [] if path.relative_to(ROOT).as_posix().startswith(OTHERS) else ast.walk(parsed(path)):
            if isinstance(node, ast.Attribute) and re.fullmatch("_[a-z].*", node.attr):
                owner = node.value.func if isinstance(node.value, ast.Call) else node.value
                if ast.unparse(owner).endswith("engine"):
                    found.append(f"{path}:{node.lineno} {node.attr}")
    assert found == []

"""Imports go from a higher layer to a lower one, no torch in `config`, nothing that unpickles."""

import ast
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "megamix"

LAYER = {
    "axes": 0,
    "beside": 1,
    "clock": 0,
    "tuned": 0,
    "durable": 0,
    "interrupt": 0,
    "live_storage": 0,
    "values": 0,
    "machine": 0,
    "names": 0,
    "progress": 0,
    "schedules": 0,
    "settings": 0,
    "starter": 0,
    "tools": 0,  # an empty `__init__.py`; each tool is a room
    "plugins": 1,
    "config": 2,
    "comm": 1,
    "mixed_precision": 2,
    "data": 2,
    "checkpoint": 3,
    "model": 3,
    "parallel": 4,
    "supervise": 4,
    "builders": 5,
    "inspect": 5,
    "arguments": 5,
    "run": 6,
    "report": 7,
    "hub": 7,
    "tools.plan": 7,
    "train": 8,
    "tools.ranks": 8,
    "tools.verify": 0,  # an empty `__init__.py`, too: three rooms on one core
    "tools.verify.core": 8,
    "tools.verify.layouts": 9,
    "tools.verify.foreign": 9,
    "tools.verify.runs": 9,
    "tools.bench": 9,
    "tools.audit": 10,
    "tools.doctor": 10,
    "command": 11,  # the verbs: each `command.py`, in whatever room it lies
    "cli": 12,
    "pretrain": 13,
    "__main__": 13,
    "__init__": 13,  # the facade: re-exports, imported by nobody inside
}
# Lower by number, yet strangers: only parallel and train bring model and engine together, and config imports no torch.
STRANGERS = {("model", "mixed_precision"), ("config", "comm")}


def room_of(name):
    """The room of a dotted name behind `megamix.`; "" is the facade's."""
    parts = name.split(".")
    if "command" in parts:
        return "command"
    if parts[0] == "tools":
        return ".".join(parts[: 3 if parts[1:2] == ["verify"] else 2])
    return parts[0] or "__init__"


def module_of(path, package):
    """The module's name behind `megamix.`; "" for the facade."""
    return ".".join(path.relative_to(package).with_suffix("").parts).removesuffix("__init__").removesuffix(".")


def imported_names(path, package):
    """Line and name behind `megamix.` of every import in a file: a module's, with the name that is taken from it."""
    folder = ["megamix", *path.relative_to(package).parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = folder[: len(folder) - node.level + 1] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            names = [f"{module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            root, _, rest = name.partition(".")
            if root == "megamix":
                yield node.lineno, rest


def violations(package):
    found = []
    for path in sorted(package.rglob("*.py")):
        here = room_of(module_of(path, package))
        is_product = LAYER[here] < LAYER["command"] and not here.startswith("tools")
        for line, name in imported_names(path, package):
            there = room_of(name)
            inside = here == there != "command"
            is_lower = LAYER.get(there, 99) < LAYER[here] and (here, there) not in STRANGERS
            if not inside and (not is_lower or (is_product and there.startswith("tools"))):
                found.append(f"{path.relative_to(package)}:{line} {here} imports {there}")
    return sorted(set(found))


def module_imports(package):
    """The modules that each module imports, anywhere in its text."""
    paths = {module_of(path, package): path for path in package.rglob("*.py")}
    imports = {}
    for module, path in paths.items():
        names = {name for _, name in imported_names(path, package)}
        imports[module] = {name if name in paths else name.rpartition(".")[0] for name in names} & {*paths}
    return imports


def circle(imports):
    """Modules of which each imports the next, and the last one the first; empty if there are none."""
    done = set()

    def walk(module, above):
        if module in above:
            return above[above.index(module) :]
        found = next((it for there in sorted(imports[module] - done) if (it := walk(there, [*above, module]))), [])
        done.add(module)
        return found

    return next((found for module in sorted(imports) if (found := walk(module, []))), [])


def test_imports_go_from_a_higher_layer_to_a_lower_one():
    assert violations(PACKAGE) == []


def test_no_modules_import_each_other_in_a_circle():
    assert circle(module_imports(PACKAGE)) == []


# These functions run code of whoever wrote their input, as the user who reads it. torch's `*_object` collectives
# unpickle what peers send.
PICKLES = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
PICKLING_CALLS = {"torch.load", "torch.save"}
PICKLING_OPTIONS = {"allow_pickle", "pickle_module"}


def unpickling(package):
    found = []
    for path in sorted(package.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = set()
            if isinstance(node, ast.Import):
                names = {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names = {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
            elif isinstance(node, ast.Attribute | ast.Name):
                names = {ast.unparse(node)}
            elif isinstance(node, ast.keyword):
                names = {node.arg or ""}
            for name in names:
                root, last = name.partition(".")[0], name.rpartition(".")[2]
                imported = isinstance(node, ast.Import | ast.ImportFrom) and root in PICKLES
                if imported or name in PICKLING_CALLS | PICKLING_OPTIONS or last.endswith(("_object", "_object_list")):
                    found.append(f"{path.relative_to(package)}:{node.lineno} {name}")
    return found


def test_nothing_unpickles_what_a_file_or_a_peer_says():
    # Between a program and the ranks that it has started, over their own pipe, as multiprocessing itself does. The
    # other one only writes a pickle, which torch's analyser reads.
    assert {*(place.partition(":")[0] for place in unpickling(PACKAGE))} == {"supervise/hang.py", "tools/ranks.py"}
    assert "from pickle import dump  #" in (PACKAGE / "supervise/hang.py").read_text()


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from pickle import loads",
        "from torch import load",
        "torch.load(path)",
        "numpy.load(path, allow_pickle=True)",
        "dist.all_gather_object(found, mine, group=group)",
        "from torch.distributed import broadcast_object_list",
    ],
)
def test_planted_pickle_is_found(tmp_path, line):
    (tmp_path / "a.py").write_text(f"import torch\n{line}\n")
    assert {place.partition(" ")[0] for place in unpickling(tmp_path)} == {"a.py:2"}


def test_every_room_has_a_layer():
    assert {room_of(module_of(path, PACKAGE)) for path in PACKAGE.rglob("*.py")} == set(LAYER)


def test_the_design_page_draws_the_rooms_as_they_are():
    page = (PACKAGE.parent / "docs/design.md").read_text()
    rows = re.findall(r"^\| (\d+) \| `megamix/([\w/]+)(?:\.py|/)` \|", page, flags=re.MULTILINE)
    assert {room.replace("/", "."): int(layer) for layer, room in rows} == {
        room: layer
        for room, layer in LAYER.items()
        if room not in ("command", "tools", "tools.verify") and not room.startswith("__")
    }
    assert f"| {LAYER['command']} | each room's `command.py` |" in page


@pytest.mark.parametrize(
    ("file", "line", "want"),
    [
        ("config/a.py", "import megamix.comm.topology", "config imports comm"),
        ("comm/a.py", "from megamix.data import loader", "comm imports data"),
        ("comm/a.py", "from megamix import data", "comm imports data"),
        ("comm/a.py", "from ..data import loader", "comm imports data"),
        ("comm/deep/a.py", "from ... import data", "comm imports data"),
        ("data/a.py", "from megamix.mixed_precision.engine import x", "data imports mixed_precision"),
        ("model/a.py", "import megamix.mixed_precision", "model imports mixed_precision"),
        ("mixed_precision/a.py", "def f():\n    from megamix.model import gpt", "mixed_precision imports model"),
        ("train/a.py", "import megamix", "train imports __init__"),
        ("train/a.py", "from megamix.unheard import x", "train imports unheard"),
        ("train/a.py", "from megamix.tools import ranks", "train imports tools.ranks"),
        ("train/a.py", "from megamix.tools.plan.limits import x", "train imports tools.plan"),
        ("tools/plan/a.py", "from megamix.train.job import run_job", "tools.plan imports train"),
        ("tools/bench/a.py", "from megamix.tools.doctor import cards", "tools.bench imports tools.doctor"),
        ("tools/verify/core/a.py", "from megamix.tools.verify.runs import x", "core imports tools.verify.runs"),
        ("tools/verify/runs/a.py", "from megamix.tools.verify.layouts import x", "runs imports tools.verify.layouts"),
        ("hub/a.py", "from megamix.hub import command", "hub imports command"),
        ("train/command.py", "from megamix.tools.plan.command import x", "command imports command"),
    ],
)
def test_planted_violation_is_found(tmp_path, file, line, want):
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    path.write_text(f"import torch\n{line}\n")
    (found,) = violations(tmp_path)
    assert found.startswith(file)
    assert found.endswith(want)


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("train/a.py", "from megamix.model.gpt import GPT"),
        ("train/a.py", "from megamix.mixed_precision import engine"),
        ("train/a.py", "from . import b"),
        ("cli.py", "from megamix.tools import bench"),
        ("cli.py", "from megamix.hub import command"),
        ("train/command.py", "from megamix.tools.plan.limits import x"),
        ("tools/doctor/a.py", "from megamix.tools.bench import sides"),
        ("tools/verify/runs/__init__.py", "from megamix.tools import ranks"),
        ("comm/a.py", "from megamixer import data"),
    ],
)
def test_allowed_import_passes(tmp_path, file, line):
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{line}\n")
    assert violations(tmp_path) == []


@pytest.mark.parametrize(
    "line", ["import megamix.data.b", "from megamix.data import b", "from . import b", "def f():\n    from .b import x"]
)
def test_planted_circle_is_found(tmp_path, line):
    (tmp_path / "data").mkdir()
    (tmp_path / "data/a.py").write_text(f"{line}\n")
    (tmp_path / "data/b.py").write_text("from megamix.data.c import x, y\n")
    (tmp_path / "data/c.py").write_text("import torch\n")
    assert circle(module_imports(tmp_path)) == []
    (tmp_path / "data/c.py").write_text("from megamix.data import a\n")
    assert circle(module_imports(tmp_path)) == ["data.a", "data.b", "data.c"]


def test_config_and_cli_load_no_torch_and_no_numpy_and_settings_no_pydantic_either():
    light = [*(PACKAGE / "config").glob("*.py"), *(PACKAGE / name for name in ("cli.py", "__main__.py"))]
    settings = [*(PACKAGE / "settings").glob("*.py")]
    for path in [*light, *settings, *PACKAGE.rglob("command.py")]:
        heavy = {"torch", "numpy", "safetensors", "tokenizers"}
        heavy |= {"pydantic", "pydantic_core"} if path in settings else set()
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert {name.partition(".")[0] for name in names} & heavy == set(), path


def later_stages(stages, folder):
    """Which file of the step imports one that stands below it in the list."""
    found = []
    for number, stage in enumerate(stages):
        tree = ast.parse((folder / f"{stage}.py").read_text())
        for node in ast.walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
            for name in names:
                there = name.removeprefix("megamix.mixed_precision.").partition(".")[0]
                if name.startswith("megamix.mixed_precision.") and there in stages[number:]:
                    found.append(f"{stage} imports {there}")
    return sorted(set(found))


def listed_stages():
    listed = ast.get_docstring(ast.parse((PACKAGE / "mixed_precision/__init__.py").read_text())) or ""
    return re.findall(r"^(\w+)  ", listed, flags=re.MULTILINE)


def test_a_stage_imports_no_later_one():
    assert len(listed_stages()) >= 15
    assert later_stages(listed_stages(), PACKAGE / "mixed_precision") == []


def test_what_a_step_tells_imports_no_stage():
    names = [name for _, name in imported_names(PACKAGE / "mixed_precision/step.py", PACKAGE)]
    assert all(name.startswith("beside.") for name in names)


@pytest.mark.parametrize(
    "line",
    [
        "from megamix.mixed_precision.b import x",
        "from megamix.mixed_precision import b",
        "def f():\n    import megamix.mixed_precision.b",
    ],
)
def test_planted_import_of_a_later_stage_is_found(tmp_path, line):
    (tmp_path / "a.py").write_text(f"{line}\n")
    (tmp_path / "b.py").write_text("from megamix.mixed_precision.a import y\n")
    assert later_stages(["a", "b"], tmp_path) == ["a imports b"]

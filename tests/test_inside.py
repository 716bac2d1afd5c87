"""Other rooms, tests and studies use only the facade of an engine; only the layout and the plan look up buckets by
number.
"""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("megamix", "tests", "docs/studies", "docs/examples")

FACADE = {
    # a step
    "backward", "step", "set_lr", "set_grad_accum_steps", "wait", "discard_step", "examine_next_step",
    "probe_loss_scale",
    # a step whose passes somebody else calls
    "micro_batches", "backward_pass", "collect", "check_module", "progress",
    # weights and state
    "whole_parameters", "full_weights", "load_weights", "state_dict", "load_state_dict", "owned_ranges", "held_states",
    "publish_masters", "refuse_unseen_writes", "begin_average", "averaged_weights", "average_decay",
    # what it was given
    "module", "optimizer", "topology", "device", "clip_grad", "grad_accum_steps",
    # what it counts, and listens to
    "loss_scale", "applied_updates", "skipped_steps", "stop_request", "clock",
    # for who looks inside: what is fixed, what it holds, and those it talks to
    "plan", "buckets", "world",
    # and how it is seen at work
    "observe", "update_path", "compile_s",
}  # fmt: skip
# An error says what to use instead.
LACKS = {
    "zero_grad", "parameters", "model", "grad_norm", "lr_scheduler", "eval", "save", "save_checkpoint", "load",
    "nonsense",
}  # fmt: skip
# The engine itself, and where `engine` is something else.
OTHERS = {
    "megamix/mixed_precision/engine.py": "itself",
    "megamix/tools/bench/ranks.py": "a side of a bench",
    "megamix/tools/audit/start/sitecustomize.py": "the engine's module",
    "megamix/tools/plan/": "the bytes of one",
    "tests/tools/plan/test_command.py": "the bytes of one",
    "tests/test_studies.py": "a curve of a study",
    "tests/tools/verify/foreign/packages.py": "DeepSpeed's",
}


def _last_name(node):
    """`step` of `self.engine.step`, and of a call of it; nothing where an expression has no name."""
    if isinstance(node, ast.Call):
        return _last_name(node.func)
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _makes_engine(node, makers):
    """Whether it is a call such as `ShardedEngine(...)` or `make_engine(...)`, or of a maker; `engine(...)` is a
    forward.
    """
    name = _last_name(node)
    return isinstance(node, ast.Call) and name != "engine" and (name in makers or name.lower().endswith("engine"))


def _pairs(target, value):
    """The pairs of target and value of an assignment, as far as they are known."""
    if not isinstance(target, ast.Tuple):
        yield target, value
    elif isinstance(value, ast.Tuple):
        yield from zip(target.elts, value.elts, strict=False)
    elif isinstance(value, ast.GeneratorExp | ast.ListComp):
        yield from ((one, value.elt) for one in target.elts)


def _is_engine(annotation):
    return annotation is not None and ast.unparse(annotation).strip("'") == "ShardedEngine"


def _engines(scope, makers):
    """Names that hold an engine in a function: by what is assigned, or by how a parameter is annotated."""
    found = set()
    for node in ast.walk(scope):
        if isinstance(node, ast.Assign):
            pairs = (pair for target in node.targets for pair in _pairs(target, node.value))
            found |= {one.id for one, value in pairs if isinstance(one, ast.Name) and _makes_engine(value, makers)}
        elif isinstance(node, ast.arg) and _is_engine(node.annotation):
            found.add(node.arg)
    return found


def _named_of(node):
    """A value and the attribute of it that is read, written or patched."""
    if isinstance(node, ast.Attribute):
        return node.value, node.attr
    if isinstance(node, ast.Call) and _last_name(node) in ("getattr", "setattr", "object") and len(node.args) > 1:
        value, name = node.args[:2]  # of `mock.patch.object`, too
        if isinstance(name, ast.Constant) and isinstance(name.value, str):
            return value, name.value
    return None


def of_the_inside(source):
    """Line and name of each attribute of an engine that is not of its facade. An engine is what has a name that ends
    with `engine`, what a function of such a name or annotation returns, and what is assigned or annotated so.
    """
    tree, found = ast.parse(source), set()
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    makers = {node.name for node in functions if _is_engine(node.returns)}
    for scope in (tree, *functions):
        engines = {"ShardedEngine"} | (_engines(scope, makers) if scope is not tree else set())
        for node in ast.walk(scope):
            if (pair := _named_of(node)) is None:
                continue
            value, name = pair
            if isinstance(value, ast.Call):
                is_engine = _makes_engine(value, makers)
            else:
                is_engine = _last_name(value) in engines or _last_name(value).endswith("engine")
            if is_engine and name not in FACADE | LACKS and not name.startswith("__"):
                found.add((node.lineno, name))
    return sorted(found)


def _sources(*rooms):
    """Path and text of each file."""
    for room in rooms:
        for path in sorted((ROOT / room).rglob("*.py")):
            yield path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")


def test_nobody_names_the_inside_of_an_engine():
    found = [
        f"{path}:{line} {name}"
        for path, source in _sources(*ROOMS)
        if "ngine" in source and not path.startswith(tuple(OTHERS))
        for line, name in of_the_inside(source)
    ]
    assert found == []


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("engine.halves.flat", "halves"),
        ("self._engine.layout", "layout"),
        ("trainer.engine.masters.shard[0]", "masters"),
        ("engine.grad_sums = []", "grad_sums"),
        ("make_engine(model).layout", "layout"),
        ("getattr(engine, '_lr_table')", "_lr_table"),
        ("mock.patch.object(ShardedEngine, '_forget_step', wrong)", "_forget_step"),
        ("def f():\n    plain = ShardedEngine(model)\n    plain.step(), plain.sums_of_mine", "sums_of_mine"),
        ("def f():\n    one, other = _engine(), 3\n    return one.layout, other.real", "layout"),
        ("def f():\n    one, other = (_engine() for _ in range(2))\n    return other.layout", "layout"),
        ("def make() -> ShardedEngine: ...\ndef f():\n    one, other = make(), make()\n    one.layout", "layout"),
        ("def f(ours: ShardedEngine):\n    return ours.collectives", "collectives"),
    ],
)
def test_a_planted_look_inside_is_found(source, name):
    assert [found for _, found in of_the_inside(source)] == [name]


@pytest.mark.parametrize(
    "source",
    [
        "engine.step(), engine.buckets[0].master, engine.plan.layout",
        "engine(tokens).float()",
        "engine.module.layout",
        "ShardedEngine.__init__",
        "def f():\n    loss = engine(x)\n    return loss.item()\ndef g():\n    loss = _engine()\n    loss.step()",
    ],
)
def test_what_the_facade_has_is_nobody_s_inside(source):
    assert of_the_inside(source) == []


# A bucket's own things lie in the Bucket. Lists beside each other, keyed by its number, are what this refuses.
NUMBERS = {"bucket", "bucket_index", "bucket_number"}  # in brackets they mean a bucket's everywhere
SHORT = {"index", "k"}  # in the room of the buckets these do
BY_NUMBER = {
    "megamix/mixed_precision/flat_layout.py": "gives the numbers",
    "megamix/mixed_precision/matrix_layout.py": "says by numbers in which buckets a matrix lies",
    "megamix/mixed_precision/bucket.py": "takes its number from the layout",
    "megamix/tools/plan/": "adds up bytes where there are no buckets",
    "megamix/clock.py": "lower than the room of the buckets: a number says which one a transfer was of",
    "megamix/comm/timeline.py": "likewise",
    "megamix/report/profiling.py": "reads what a timeline says",
    "megamix/report/ledger.py": "its buckets hold seconds",
    "megamix/report/goodput.py": "likewise",
    "megamix/report/page.py": "likewise",
}


def _direct(place):
    """Names that are numbers in brackets: `bucket` in `[bucket]`, `[kind, bucket]`, `[bucket - 1]` and `[: bucket]`."""
    if isinstance(place, ast.Name | ast.Attribute):
        return {_last_name(place)}
    if isinstance(place, ast.Tuple):
        return set().union(*map(_direct, place.elts))
    if isinstance(place, ast.Slice):
        return _direct(place.lower) | _direct(place.upper)
    if isinstance(place, ast.BinOp) and isinstance(place.right, ast.Constant):
        return _direct(place.left)
    return set()


def by_number(source, numbers):
    """Line and text of what goes by a bucket's number: a subscript with such a name; any of what has a name that ends
    with `buckets`, but for a constant place; a parameter that is such a number; a count of buckets.
    """
    found = []
    for node in ast.walk(ast.parse(source)):
        goes_by_it = False
        if isinstance(node, ast.Subscript):
            of_buckets = _last_name(node.value).endswith("buckets")
            constant = isinstance(node.slice, ast.Constant | ast.UnaryOp | ast.Slice)
            goes_by_it = bool(_direct(node.slice) & numbers) or (of_buckets and not constant)
        elif isinstance(node, ast.arg) and node.annotation is not None:
            goes_by_it = node.arg in NUMBERS and "int" in ast.unparse(node.annotation).split(" | ")
        elif isinstance(node, ast.Call) and _last_name(node) == "enumerate":
            goes_by_it = any(_last_name(one).endswith("buckets") for one in node.args)
        if goes_by_it:
            found.append((node.lineno, ast.unparse(node)))
    return sorted(found)


def test_only_the_layout_and_the_plan_go_by_a_bucket_s_number():
    found = [
        f"{path}:{line} {text}"
        for path, source in _sources("megamix")
        if not path.startswith(tuple(BY_NUMBER))
        for line, text in by_number(source, NUMBERS | SHORT if "/mixed_precision/" in path else NUMBERS)
    ]
    assert found == []


@pytest.mark.parametrize(
    "source",
    [
        "self.flat[bucket]",
        "self._pending[bucket - 1]",
        "among[: bucket + 1]",
        "times[kind, bucket] = 0",
        "self._masters[k]",
        "self._missing[place.bucket]",
        "layout.buckets[turn]",
        "engine.buckets[order.index(unit)]",
        "def free(self, bucket: int): ...",
        "def free(bucket: int | None = None): ...",
        "for place, bucket in enumerate(layout.buckets): ...",
    ],
)
def test_a_planted_number_is_found(source):
    assert len(by_number(source, NUMBERS | SHORT)) == 1


@pytest.mark.parametrize(
    "source",
    [
        "for bucket in buckets: bucket.master",
        "engine.buckets[0].master",
        "buckets[::-1]",
        "sums[bucket.axis]",
        "rows[[index[name] for name in names]]",
        "def free(self, bucket: Bucket): ...",
    ],
)
def test_a_bucket_itself_is_no_number(source):
    assert by_number(source, NUMBERS | SHORT) == []

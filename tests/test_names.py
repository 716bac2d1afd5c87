"""No two public classes of the package have the same name."""

import ast
from collections import defaultdict
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "megamix"


def repeated_classes(package):
    """The public classes of one name, at the top of a file or inside another class or function: name, their files."""
    files = defaultdict(list)
    for path in sorted(package.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                files[node.name].append(f"{path.relative_to(package)}")
    return {name: places for name, places in files.items() if len(places) > 1}


def test_a_public_class_name_exists_once():
    assert repeated_classes(PACKAGE) == {}


def test_a_planted_repetition_is_found_and_a_private_name_may_repeat(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "a.py").write_text("class Border: ...\nclass _Start: ...\nclass Piece: ...\n")
    (tmp_path / "deep/b.py").write_text("class _Start: ...\ndef f():\n    class Border: ...\n")
    assert repeated_classes(tmp_path) == {"Border": ["a.py", "deep/b.py"]}

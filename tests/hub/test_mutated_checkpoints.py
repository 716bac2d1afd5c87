"""Whoever uses a checkpoint of another version, or of a program's own: `generate`, `evaluate` and `export` report in
one line what is wrong in its manifest.
"""

import shutil
from pathlib import Path

import pytest

from megamix.cli import main
from megamix.hub.convert import import_model
from tests.checkpoint.seal import edit
from tests.hub.folders import LLAMA, write_hugging_face

VERBS = {"generate": [], "evaluate": ["--data", "nowhere"], "export": ["--to", "hf", "out"]}


def _toml(text):
    return lambda fields: fields["run"].update(config=fields["run"]["config"] + text)


WRONG = {
    "another model": (lambda fields: fields["params"][0].update(name="x"), "x"),
    "no model": (lambda fields: fields["run"].update(config=""), "vocab_size"),
    "a library's": (
        lambda fields: fields.update(applied_updates=1) or fields["run"].update(config=""),
        "a checkpoint of the library, without [model]",
    ),
    "an unknown key": (
        lambda fields: fields["run"].update(config=fields["run"]["config"].replace("[model]", "[model]\nlater = 1")),
        "later",
    ),
}


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    folder = Path(tmp_path_factory.mktemp("imported"))
    write_hugging_face(LLAMA, folder / "hf")
    import_model(folder / "hf", folder / "in")
    return folder / "in"


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_manifest_is_told_by_name(imported, tmp_path, monkeypatch, capsys, name, verb):
    change, told = WRONG[name]
    monkeypatch.chdir(tmp_path)
    copy = shutil.copytree(imported, tmp_path / "copy")
    (checkpoint,) = (copy / "checkpoints").iterdir()
    edit(checkpoint, change)
    assert main([verb, str(copy), *VERBS[verb]]) in (1, 2)
    printed = capsys.readouterr()
    assert told in printed.err
    assert str(checkpoint) in printed.err
    assert "Traceback" not in printed.err
    assert not (tmp_path / "out").exists()

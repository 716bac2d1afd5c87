"""The family of docs/own_model.md, pasted as it stands, is checked and trained by the job of the page, made smaller."""

import re
import sys
from pathlib import Path

from megamix.cli.verbs import main
from megamix.plugins import FAMILIES

PAGE = (Path(__file__).parents[2] / "docs/own_model.md").read_text(encoding="utf-8")
REST = """
[data]
train = [{ markov = 4 }]

[optimizer]
lr = 1e-2
compile = false

[training]
steps = 20
micro_batch_size = 2
global_batch_size = 2

[metrics]
log_interval = 1
tensorboard = false

[checkpoint]
folder = "run"
"""
SMALL = ["model.vocab_size=64", "model.seq_len=16", "model.hidden_size=24", "model.num_layers=2"]


def block(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)[0]


def test_the_family_of_the_page_trains(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("my_family.py").write_text(block("python"), encoding="utf-8")
    Path("job.toml").write_text(block("toml") + REST, encoding="utf-8")
    try:
        assert main(["train", "job.toml", "--check"]) == 0
        assert "no problems" in capsys.readouterr().out
        assert main(["train", "job.toml", *SMALL]) == 0
        losses = [float(loss) for loss in re.findall(r"\| loss ([\d.]+) \|", capsys.readouterr().out)]
        assert len(losses) == 20
        assert losses[-1] < losses[0]
    finally:
        del FAMILIES.registered["mine"], FAMILIES.sections["mine"], sys.modules["my_family"]

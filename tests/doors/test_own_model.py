"""The family of docs/own_model.md, pasted as it stands, is checked and trained by the job of the page, made smaller."""

import re
import sys
from pathlib import Path

from megamix.cli.verbs import main
from megamix.plugins import FAMILIES

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/own_model.md").read_text(encoding="utf-8")
BASE = (ROOT / "configs/base.toml").read_text(encoding="utf-8")
DATA = """[data]
train = [{ markov = 4 }]
valid = [{ markov = 4 }]
"""
SMALL = [
    "model.vocab_size=64", "model.seq_len=16", "model.hidden_size=24", "model.num_layers=2",
    "optimizer.compile=false", "training.steps=20", "lr_schedule.warmup_steps=2", "training.micro_batch_size=2",
    "training.global_batch_size=2", "metrics.log_interval=1", "metrics.tensorboard=false",
]  # fmt: skip


def block(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)[0]


def test_the_family_of_the_page_trains(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("my_family.py").write_text(block("python"), encoding="utf-8")
    Path("job.toml").write_text(block("toml"), encoding="utf-8")
    Path("configs").mkdir()
    without_files = re.sub(r"^\[data\]\n.*?\n\n", f"{DATA}\n", BASE, flags=re.MULTILINE | re.DOTALL)
    Path("configs/base.toml").write_text(without_files, encoding="utf-8")
    try:
        assert main(["train", "job.toml", "--check"]) == 0
        assert "no problems" in capsys.readouterr().out
        assert main(["train", "job.toml", *SMALL]) == 0
        losses = [float(loss) for loss in re.findall(r"\| loss ([\d.]+) \|", capsys.readouterr().out)]
        assert len(losses) == 20
        assert losses[-1] < losses[0]
    finally:
        del FAMILIES.registered["mine"], FAMILIES.sections["mine"], sys.modules["my_family"]

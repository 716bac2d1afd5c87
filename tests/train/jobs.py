"""A tiny job on data that the test writes itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megamix.config import Config, config_from_dict
from megamix.data.synthetic import MarkovSource
from megamix.data.token_file import TokenFileWriter
from megamix.data.tokenizer import Tokenizer

VOCAB, SEQ_LEN, BRANCHING = 64, 32, 4  # each token has 4 equally likely successors: no model can get below ln 4


def write_data(folder: Path, tokenizer: bool = False) -> None:
    """Token files of a Markov chain whose entropy is ln(BRANCHING), and a tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    source = MarkovSource(vocab_size=VOCAB, seq_len=SEQ_LEN, branching=BRANCHING, seed=3)
    for name, samples in (("train", range(2000)), ("valid", range(2000, 2200))):
        with TokenFileWriter(folder / name, VOCAB) as writer:
            for row in source.read(samples):
                writer.add(row)
    if tokenizer:
        Tokenizer.train(["def f(x):\n    return x\n"] * 10, 280).save(folder / "tokenizer.json")


def tiny_job(folder: Path, **overrides: Any) -> Config:
    """A job in folder/run on folder/data; overrides are sections with keys, e.g. training={"steps": 3}."""
    tree: dict[str, dict[str, Any]] = {
        "model": {"vocab_size": VOCAB, "seq_len": SEQ_LEN, "hidden_size": 32, "num_layers": 2, "num_heads": 2},
        "data": {"train": str(folder / "data/train"), "valid": str(folder / "data/valid")},
        "optimizer": {"lr": 0.01, "compile": False},
        "lr_schedule": {"warmup_steps": 2},
        "precision": {"dtype": "fp16", "growth_interval": 5},
        "training": {"steps": 12, "micro_batch_size": 2, "global_batch_size": 8, "eval_interval": 5, "eval_batches": 2},
        "parallelism": {},
        "checkpoint": {"folder": str(folder / "run")},
        "metrics": {"log_interval": 4},
        "profiling": {},
    }
    for section, keys in overrides.items():
        tree[section] |= keys
    return config_from_dict(tree)

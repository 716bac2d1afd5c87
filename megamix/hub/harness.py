"""lm-eval-harness (github.com/EleutherAI/lm-evaluation-harness) on a Hugging Face folder; the extra `harness`."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megamix.comm.topology import local_device


def check_harness() -> None:
    """Raises: ValueError naming what to install."""
    if importlib.util.find_spec("lm_eval") is None:
        raise ValueError("--harness: the package lm_eval is not installed; run pip install 'megamix[harness]'")


def run_harness(folder: Path, tasks: Sequence[str], dtype: str) -> dict[str, dict[str, Any]]:
    """Every task's metrics by name. A task is one of lm-eval's, or the path of a YAML file that defines one."""
    check_harness()
    import lm_eval
    from lm_eval.tasks import TaskManager

    files = [Path(task) for task in tasks if task.endswith((".yaml", ".yml"))]
    names = [Path(task).stem if Path(task) in files else task for task in tasks]
    manager = TaskManager(include_path=[str(file.parent) for file in files] or None)
    results = lm_eval.simple_evaluate(
        model="hf", model_args={"pretrained": str(folder), "dtype": dtype}, tasks=names, task_manager=manager,
        device=str(local_device()),
    )  # fmt: skip
    scores: dict[str, dict[str, Any]] = results["results"]
    return {task: {key: value for key, value in metrics.items() if key != "alias"} for task, metrics in scores.items()}

"""Perplexity of a token file, and the tasks of lm-eval-harness.

Every token of the file but the first is a target exactly once. The harness is
github.com/EleutherAI/lm-evaluation-harness; the extra `harness` installs it.
"""

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from megamix.base.progress import ProgressLine
from megamix.comm.topology import local_device
from megamix.data.loader import IGNORE
from megamix.data.steady_file import FileArray
from megamix.data.token_file import TokenFile, id_outside
from megamix.data.tokenizer import open_tokenizer
from megamix.data.tokenizer_files import read_settings
from megamix.hf.tokenizer_files import tokenizer_in
from megamix.model.language_model import LanguageModel

MANIFEST = "manifest.json"  # name of the file that `megamix prepare` writes beside its token files
_TOKENS = 16_384  # tokens in one forward; a longer window has a forward of its own
_STRETCH = 2**22  # tokens that are searched at a time for ids that the model lacks


class Evaluation(NamedTuple):
    """Cross entropy over a token file, or its beginning."""

    targets: int
    nats_per_token: float
    perplexity: float
    bits_per_byte: float | None  # of text, if the manifest of the data has its bytes and the file is read whole


def evaluate(
    model: LanguageModel,
    prefix: Path,
    stride: int,
    seq_len: int,
    max_tokens: int | None = None,
    progress: ProgressLine | None = None,
) -> Evaluation:
    """Evaluate a token file as one stream, in windows of up to seq_len tokens that begin `stride` tokens apart. A
    target counts only in the first window that has it, so each token counts once. The model sees the tokens before it
    in that window: at least seq_len - stride of them, except at the file's beginning.

    `max_tokens`: the file's first tokens alone, 2 or more; None: all of them.

    Raises: ValueError if the file is damaged, too short or of another vocabulary.
    """
    progress = progress or ProgressLine()
    vocab_size = model.config.vocab_size
    tokens = TokenFile(prefix).tokens
    if len(tokens) < 2:
        raise ValueError(f"{prefix} has {len(tokens)} token(s): none follows another one")
    stop = len(tokens) if max_tokens is None else min(len(tokens), max_tokens)
    stretches = (tokens[start : min(start + _STRETCH, stop)] for start in range(0, stop, _STRETCH))
    if (outside := id_outside(stretches, vocab_size)) is not None:
        raise ValueError(
            f"{prefix} holds token id {outside}, the model's vocabulary has {vocab_size}; give its own data"
        )
    nats, targets = 0.0, 0
    progress.begin(f"{stop - 1:,} tokens of {prefix}", total=stop - 1)
    with torch.no_grad():
        for rows in _batches(tokens, stop, seq_len, stride):
            given, goal = torch.from_numpy(rows).to(model.device)
            nats += float(model(given, goal)) * goal.numel()
            counted = int((goal != IGNORE).sum())
            targets += counted
            progress.advance(counted)
    text_bytes = _text_bytes(prefix) if stop == len(tokens) else None
    mean = nats / targets
    perplexity = math.exp(mean) if mean < 700 else math.inf  # exp(710) overflows FP64
    return Evaluation(targets, mean, perplexity, nats / math.log(2) / text_bytes if text_bytes else None)


def _batches(tokens: FileArray, stop: int, seq_len: int, stride: int) -> Iterator[NDArray[np.int64]]:
    """Yield batches INT64 (2, windows, T) of the first `stop` tokens: tokens, and their targets or IGNORE. A shorter
    last window comes alone.
    """
    alike = list[NDArray[np.int64]]()  # windows of one length
    most = max(1, _TOKENS // seq_len)
    counted = 0  # index in the file of the last target that has counted
    for start in range(0, stop, stride):
        end = min(start + seq_len, stop - 1)
        window = np.stack([tokens[start:end], tokens[start + 1 : end + 1]]).astype(np.int64)
        window[1, : counted - start] = IGNORE
        counted = end
        if len(alike) == most or (alike and end - start < seq_len):
            yield np.stack(alike, axis=1)
            alike = []
        alike.append(window)
        if end == stop - 1:
            break
    yield np.stack(alike, axis=1)


def _text_bytes(prefix: Path) -> int | None:
    try:
        return int(json.loads((prefix.parent / MANIFEST).read_bytes())["parts"][prefix.name]["num_bytes"])
    except (OSError, ValueError, LookupError, TypeError):
        return None  # the data are not from `megamix prepare`, or from an older one


def run_harness(folder: Path, tasks: Sequence[str], dtype: str) -> dict[str, dict[str, Any]]:
    """Return the metrics of every task, by its name. A task is one of lm-eval's, or the path of a YAML file of one.

    Raises: ValueError for a YAML file that names no task.
    """
    import lm_eval
    from lm_eval.tasks import TaskManager

    files = [Path(task) for task in tasks if task.endswith(".yaml")]
    names = [_task_in(Path(task)) if Path(task) in files else task for task in tasks]
    manager = TaskManager(include_path=[str(file.parent) for file in files] or None)
    arguments: dict[str, Any] = {"pretrained": str(folder), "dtype": dtype}
    if "add_bos_token" in read_settings(folder) and (file := tokenizer_in(folder)) is not None:
        # As it was trained: lm-eval would begin an empty text by the begin token, though no document had one.
        tokenizer = open_tokenizer(file)
        first = tokenizer.begin[0] if tokenizer.begin else tokenizer.end_of_text
        arguments |= {"add_bos_token": bool(tokenizer.begin), "prefix_token_id": first}
    results = lm_eval.simple_evaluate(
        model="hf", model_args=arguments, tasks=names, task_manager=manager, device=str(local_device())
    )
    scores: dict[str, dict[str, Any]] = results["results"]
    return {task: {key: value for key, value in metrics.items() if key != "alias"} for task, metrics in scores.items()}


def _task_in(file: Path) -> str:
    """Return the name under which lm-eval knows the task or group of a YAML file."""
    import yaml

    try:
        table = yaml.load(file.read_text(encoding="utf-8"), yaml.BaseLoader)  # `!function` stays a text
        return str(table.get("group") or table["task"])
    except (OSError, yaml.YAMLError, AttributeError, LookupError) as error:
        raise ValueError(f"--harness {file} names no task ({error!r}); write its name there, as task: NAME") from error

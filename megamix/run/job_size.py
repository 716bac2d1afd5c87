"""The size of a job in a few lines: parameters, tokens, memory, and whether the disk has room for its checkpoints.

torch is imported only for a family that is not built in. Of the built-in one norms, biases and tables of positions are
not counted: less than 1 %.
"""

import shutil

from megamix.builders.data import epochs
from megamix.checkpoint.folder import checkpoints
from megamix.config import Config, tokens_of
from megamix.config.batch_ramp import sizes_by_key
from megamix.durable import existing_parent
from megamix.run.least_memory import STATES, amount, least_held, least_params, memory_here
from megamix.run.run_folder import checkpoint_folder


def size_lines(config: Config) -> list[str]:
    """Return the lines, each with one fact. Raises: as `least_held`."""
    held, limit, what = memory_here(config)
    params = least_params(config)
    memory = (
        f"{amount(sum(held.values()))} a rank between steps, more within one; each may take {amount(limit)} ({what})"
    )
    count = f"{params / 1e9:.3g} B" if params >= 1e9 else f"{params / 1e6:.3g} M"
    facts = [("parameters", count), *_tokens(config), ("memory", memory), ("checkpoint", _disk(config)[0])]
    return [f"{name:<13} {fact}" for name, fact in facts]


def disk_problem(config: Config) -> str | None:
    """Return why the run's checkpoints and weights do not fit on the disk; None if they do. Raises: as `least_held`."""
    words, fits = _disk(config)
    keep = ", or a lower checkpoint.keep" if config.checkpoint.keep > 2 else ""  # 2 is the least
    return None if fits else f"checkpoint.folder: a checkpoint takes {words}; write another folder{keep}"


def _tokens(config: Config) -> list[tuple[str, str]]:
    tokens, seq_len = tokens_of(config, config.training.steps), config.model.seq_len
    batches = sorted(seq_len * size for _, size in sizes_by_key(config.training))
    batch = " to ".join(f"{size:,}" for size in dict.fromkeys((batches[0], batches[-1])))
    most = sorted(epochs(config, tokens // seq_len), reverse=True)[:3]  # a mixture may have many corpora
    corpora = [f"{often:,.2f} epochs of {size:,} in {name}" for often, size, name in most]
    return [("tokens", f"{tokens:,} in {config.training.steps:,} updates of {batch}"), *(("", it) for it in corpora)]


def _disk(config: Config) -> tuple[str, bool]:
    """Return in words what the run's checkpoints take, and whether the disk has room for them."""
    section, folder, steps = config.checkpoint, checkpoint_folder(config), config.training.steps
    held = least_held(config, config.parallelism.replicas)  # on so many ranks one owns the whole model
    weights = held["FP32 masters"] + held["FP32 average of the weights"]
    checkpoint = weights + held["optimizer states"]
    saves = -(-steps // section.save_interval) if section.save_interval else 1
    stay = steps // section.keep_every if section.keep_every else 0
    more = max(1, min(section.keep + 1, saves) + stay - len(checkpoints(folder)))
    need, free = more * checkpoint + weights, shutil.disk_usage(existing_parent(folder)).free
    size = amount(checkpoint) + ("" if config.optimizer.name in STATES else " or more")
    words = f"{size}; {more} of them and the weights need {amount(need)}, {amount(free)} are free in {section.folder}"
    return words, need <= free

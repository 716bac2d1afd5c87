"""The size of a job in a few lines: parameters, tokens, memory, and whether machine and disk have room for it.

torch is imported only for a job that needs much memory or whose family is a plugin's. Of the built-in one norms, biases
and tables of positions are not counted: less than 1 %.
"""

import os
import shutil
from pathlib import Path

from megamix.base.durable import existing_parent
from megamix.base.machine import has_gpu, memory_for_each
from megamix.checkpoint.folder import CHECKPOINTS, checkpoints
from megamix.checkpoint.slots import SHARED
from megamix.config import Config
from megamix.launch.leftovers import room_for
from megamix.train.corpus import JobCorpus
from megamix.train.least_memory import GIB, STATES, LeastHeld, amount, mirrored


class JobSize:
    """Counts what a job takes of this machine, on the ranks that this environment starts. Raises: as `LeastHeld`."""

    def __init__(self, config: Config):
        averages = config.training.average is not None
        self._least = LeastHeld(config.model, config.optimizer, config.precision, config.parallelism, averages=averages)
        self._corpus = JobCorpus(config.data, config.model)
        self._pace, self._seed, self._section = config.pace, config.training.seed, config.checkpoint
        self._replicas, self._optimizer = config.parallelism.replicas, config.optimizer.name
        self._ranks = int(os.environ.get("WORLD_SIZE", "1"))
        self._held = self._least.by_category(self._ranks)
        self._ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", str(self._ranks)))

    def lines(self, before: int = 0) -> list[str]:
        """Return what the job takes. `before`: number of its updates that another run has made."""
        limit, what = self._memory_here()
        params, held = self._least.params, amount(sum(self._held.values()))
        memory = f"{held} a rank between steps, more within one; each may take {amount(limit)} ({what})"
        count = f"{params / 1e9:.3g} B" if params >= 1e9 else f"{params / 1e6:.3g} M"
        facts = [("parameters", count), *self._tokens(before), ("memory", memory), ("checkpoint", self._disk()[0])]
        if SHARED.is_dir():
            takes = "takes" if self._section.mirror else "checkpoint.mirror = 1 would take"
            share, need, room = map(amount, self._mirrored())
            facts.append(("mirror", f"{takes} {share} a rank, {need} of the {room} free in {SHARED} here"))
        return [f"{name:<13} {fact}" for name, fact in facts]

    def disk_problem(self) -> str | None:
        """Return why the run's checkpoints and weights do not fit on the disk; None if they do."""
        words, fits = self._disk()
        keep = ", or a lower checkpoint.keep" if self._section.keep > 2 else ""  # 2 is the least
        return None if fits else f"checkpoint.folder: a checkpoint takes {words}; write another folder{keep}"

    def memory_problem(self) -> str | None:
        """Return why the ranks cannot hold the job; None if they probably can."""
        limit, what = self._memory_here()
        need = sum(self._held.values())
        if need <= limit:
            return None
        table = ", ".join(f"{name} {size / GIB:,.2f} GiB" for name, size in self._held.items() if size)
        return (
            f"memory: a rank holds {need / GIB:,.2f} GiB or more between steps ({table}), and of {what} it has "
            f"{limit / GIB:,.2f} GiB; start more ranks, set parallelism.shard, tensor or pipeline, or make the model "
            f"smaller: megamix plan CONFIG --world {self._ranks} shows what a rank needs"
        )

    def mirror_problem(self) -> str | None:
        """Return why this machine has no room for the copies of checkpoint.mirror; None if it probably has."""
        if not self._section.mirror:
            return None
        share, need, room = self._mirrored()
        got = f"checkpoint.mirror: got {self._section.mirror}, which takes {amount(need)} of {SHARED}"
        if need > room:
            there = f"where {amount(room)} can be taken" if SHARED.is_dir() else "which this machine lacks"
            size = f"{need // GIB + 2:.0f}"  # NCCL takes some, too
            return (
                f"{got}, {there}; write mirror = 0, or in a container make it larger: docker run --shm-size={size}g, "
                f"in Kubernetes an emptyDir with medium: Memory and sizeLimit: {size}Gi at /dev/shm"
            )
        held, (limit, what) = sum(self._held.values()), memory_for_each(self._ranks_here)
        if share > limit or (share + held > limit and not has_gpu()):
            return (
                f"{got}, {amount(share)} a rank beside the {amount(held)} that it holds, and of {what} it has "
                f"{amount(limit)}; write mirror = 0, or allow the container more: docker run --memory, in Kubernetes "
                "resources.limits.memory"
            )
        return None

    def _mirrored(self) -> tuple[float, float, float]:
        """Return the most bytes that checkpoint.mirror takes of shared memory for a rank and for all ranks here, and
        those that it can have.
        """
        nodes = 2 if self._ranks > self._ranks_here and self._replicas == 1 else 1  # the next one has a copy, too
        share = nodes * mirrored(self._held, self._section)
        return share, share * self._ranks_here, room_for(Path(self._section.folder))

    def _memory_here(self) -> tuple[float, str]:
        """Return the bytes that each rank may take, and what sets that limit."""
        limit, what = memory_for_each(self._ranks_here)
        if sum(self._held.values()) > min(limit, GIB) and has_gpu():
            import torch

            limit, what = float(torch.cuda.get_device_properties(0).total_memory), "its GPU"
        return limit, what

    def _tokens(self, before: int) -> list[tuple[str, str]]:
        pace = self._pace
        tokens, after = pace.tokens_left(before), f" after update {before:,}" * bool(before)
        batches = sorted(pace.seq_len * size for _, size in pace.sizes)
        batch = " to ".join(f"{size:,}" for size in dict.fromkeys((batches[0], batches[-1])))
        most = sorted(self._corpus.epochs(self._seed, tokens // pace.seq_len), reverse=True)[:3]  # there may be many
        corpora = [f"{often:,.2f} epochs of {corpus}" for often, corpus in most]
        told = f"{tokens:,} in {pace.steps - before:,} updates of {batch}{after}"
        return [("tokens", told), *(("", it) for it in corpora)]

    def _disk(self) -> tuple[str, bool]:
        """Return in words what the run's checkpoints take, and whether the disk has room for them."""
        section, folder, steps = self._section, Path(self._section.folder, CHECKPOINTS), self._pace.steps
        held = self._least.by_category(self._replicas)  # on so many ranks one owns the whole model
        weights = held["FP32 masters"] + held["FP32 average of the weights"]
        checkpoint = weights + held["optimizer states"]
        saves = -(-steps // section.save_interval) if section.save_interval else 1
        stay = steps // section.keep_every if section.keep_every else 0
        more = max(1, min(section.keep + 1, saves) + stay - len(checkpoints(folder)))
        need, free = more * checkpoint + weights, shutil.disk_usage(existing_parent(folder)).free
        size = amount(checkpoint) + ("" if self._optimizer in STATES else " or more")
        needed = f"{more} of them and the weights need {amount(need)}"
        return f"{size}; {needed}, {amount(free)} are free in {section.folder}", need <= free

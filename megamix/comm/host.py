"""Messages between ranks beside a step: host tensors, and records of the ranks' last collectives."""

import contextlib
import datetime
import json
import os
import socket
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from megamix.comm.collectives import Collectives, make_collectives
from megamix.comm.topology import Axis


def tell_collectives(path: Path) -> None:
    """Write torch's flight recorder as JSON: this rank's last collectives, whether each has begun and ended, and the
    ranks of its groups, which torch itself tells of NCCL's alone. Do nothing if torch or the disk fails.

    Any thread may call it. The record shows which rank is late even if the host runs ahead of NCCL, when stacks do not.
    """
    with contextlib.suppress(Exception):
        backend = "nccl" if dist.get_backend() == "nccl" else "fr"  # "fr" serves all other backends
        recorded = json.loads(getattr(torch._C._distributed_c10d, f"_dump_{backend}_trace_json")())
        recorded["pg_config"] = {
            group.group_name: {"name": group.group_name, "desc": group.group_desc, "ranks": str([*ranks])}
            for group, ranks in dist.distributed_c10d._world.pg_group_ranks.items()
        }
        path.write_text(json.dumps(recorded))


def host_collectives(world: Axis, timeout_s: float) -> Collectives:
    """Connect the ranks by a new group for host tensors, which waits for no device. Every rank must call it.

    Units: `timeout_s` bounds the wait for the slowest rank; after a timeout the group cannot be used any more.
    """
    group = None
    if world.group is not None:
        try:
            group = dist.new_group(list(world.ranks), datetime.timedelta(seconds=timeout_s), backend="gloo")
        except RuntimeError as error:
            raise RuntimeError(
                f"the ranks' processes cannot reach each other by Gloo, which checkpoints need on GPUs, too: on "
                f"{socket.gethostname()} GLOO_SOCKET_IFNAME is {os.environ.get('GLOO_SOCKET_IFNAME', 'not set')}; set "
                "it to the network interface of the nodes, or let the node's name resolve to its address"
            ) from error
    return make_collectives(replace(world, group=group), torch.device("cpu"))


class HostMessages:
    """Messages of bytes from rank to rank, beside all collectives. Every rank of the world must make one."""

    def __init__(self, world: Axis, timeout_s: float):
        self._group = host_collectives(world, timeout_s).axis.group

    def send(self, to: int, text: str, data: Tensor) -> list[dist.Work | None]:
        """Begin to send a text and `data`, which may not change until `wait` has returned. Shapes: data (n,), U8."""
        words = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        return [dist.isend(one, group=self._group, group_dst=to) for one in (torch.tensor([len(words)]), words, data)]

    def announced(self, giver: int) -> str:
        """Wait for a text, and return it. `receive` must follow."""
        length = torch.empty(1, dtype=torch.int64)
        dist.recv(length, group=self._group, group_src=giver)
        words = torch.empty(int(length), dtype=torch.uint8)
        dist.recv(words, group=self._group, group_src=giver)
        return words.numpy().tobytes().decode()

    def receive(self, giver: int, data: Tensor) -> None:
        dist.recv(data, group=self._group, group_src=giver)

    @staticmethod
    def wait(sent: Iterable[dist.Work | None]) -> None:
        for work in sent:
            if work is not None:
                work.wait()

"""Where the ranks of one machine meet: in a store of the launcher's that only this machine reaches.

torchrun's own way, `--standalone` and the backend c10d, unpickles what lies in a store without a password that listens
on every interface: who writes to it runs code as the job's owner. Here the store listens on loopback, and torchrun
reads nothing from it but JSON and counts. Many machines meet by torchrun's static rendezvous, which unpickles nothing
either. docs/security.md says what is left to trust.
"""

from __future__ import annotations

import datetime
import os
import socket
import time
from collections.abc import Callable, MutableMapping

from megamix.config import ConfigError
from megamix.machine import tell_torch


# Above torch's imports: whichever comes first, those end with torch looking here for what the entry point names.
def create_handler(params: rendezvous.RendezvousParameters) -> rendezvous.RendezvousHandler:
    """Make the rendezvous, for torchrun's registry. Raises: ValueError for several machines, or a place to meet."""
    if params.max_nodes > 1:
        raise ValueError(
            f"--nnodes: got {params.max_nodes}, the rendezvous {BACKEND!r} is for the ranks of one machine; leave "
            "--rdzv-backend out, and give --node-rank, --master-addr and --master-port"
        )
    if params.endpoint not in ("", _ANY_PORT):
        raise ValueError(
            f"--rdzv-endpoint: got {params.endpoint}, the rendezvous {BACKEND!r} takes a free port of {_LOOPBACK}; "
            "leave it out"
        )
    return LoopbackRendezvous(params.run_id)


def handler_creator() -> rendezvous.RendezvousHandlerCreator:
    """Return what the entry point `torchrun.handlers` names."""
    return create_handler


from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # not in __all__  # noqa: E402  # see there
from torch.distributed.elastic import rendezvous  # noqa: E402  # see create_handler
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous  # noqa: E402  # see create_handler

BACKEND = "loopback"  # torchrun --rdzv-backend=loopback

NAME_S = 20.0  # in which machine 0's name must have an address
_LOOPBACK = "127.0.0.1"
_ANY_PORT = "localhost:0"  # the endpoint that --standalone has
# Without them Gloo and NCCL listen on the interface that the machine's name resolves to. NCCL takes a name without "="
# for the beginning of one.
_INTERFACES = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}


class LoopbackRendezvous(StaticTCPRendezvous):
    """torchrun's part in it: one machine, whose agent holds the store for as long as there are ranks. What else
    torchrun asks (closed? more nodes?) is answered as where nodes are counted beforehand.
    """

    def __init__(self, run_id: str):
        super().__init__(_LOOPBACK, 0, rank=0, world_size=1, run_id=run_id, timeout=0)

    def get_backend(self) -> str:
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        return True  # else the first rank opens one of its own, on every interface

    def next_rendezvous(self) -> rendezvous.RendezvousInfo:
        keep_to_loopback(os.environ)  # which the ranks inherit
        store = loopback_store()
        agents = PrefixStore("agent", store)  # apart from the ranks' keys
        return rendezvous.RendezvousInfo(agents, 0, 1, rendezvous.RendezvousStoreInfo(_LOOPBACK, store.port))


def torchrun(arguments: list[str]) -> None:
    """torchrun's main, with ours where it would take c10d by itself: with --standalone, and for one machine of which
    nothing else is said.
    """
    # Not above: a torchrun by hand, that finds this module by its entry point, is half imported by then.
    from torch.distributed.elastic.multiprocessing.errors import record
    from torch.distributed.run import determine_local_world_size, get_args_parser, parse_min_max_nnodes, run

    rendezvous.rendezvous_handler_registry.register(BACKEND, create_handler)
    args = get_args_parser().parse_args(arguments)
    nothing_said = args.rdzv_backend == "static" and not args.rdzv_endpoint and args.master_port is None
    if args.standalone or (nothing_said and parse_min_max_nnodes(args.nnodes)[1] == 1):
        args.standalone, args.rdzv_backend, args.rdzv_endpoint = False, BACKEND, _ANY_PORT
    elif args.rdzv_backend == "static":
        _require_meeting(args.master_addr, int(args.master_port or 29500), listens=args.node_rank == 0)
    tell_torch(determine_local_world_size(args.nproc_per_node))  # torchrun's own choice is one thread
    record(run)(args)


def _require_meeting(host: str, port: int, *, listens: bool) -> None:
    """Wait until machine 0's name has an address, for that may be starting; there, see whether its port is free.

    Raises: ConfigError.
    """
    end_s = time.monotonic() + NAME_S
    while why := _refusal(lambda: socket.getaddrinfo(host, port)):
        if time.monotonic() > end_s:
            told = f"MASTER_ADDR: got {host}, for port {port}, which has no address here within {NAME_S:g} s ({why})"
            raise ConfigError([f"{told}; write machine 0's name or address as all know it (getent hosts {host})"])
        time.sleep(NAME_S / 20)
    if listens and (why := _refusal(lambda: socket.create_server(("", port)).close())):
        told = f"MASTER_PORT: got {port}, at which nobody can listen on this machine, {host} ({why})"
        raise ConfigError([f"{told}; end who does (ss -ltnp sport = :{port}), or write another port on all machines"])


def _refusal(call: Callable[[], object]) -> str:
    """Return why the system does not do it; "" if it does."""
    try:
        call()
    except OSError as error:
        return os.strerror(error.errno) if error.errno and error.errno > 0 else str(error.strerror)
    return ""


def loopback_store() -> TCPStore:
    """Return a store that only this machine reaches. Told the host alone, TCPStore would listen on every interface."""
    with socket.create_server((_LOOPBACK, 0)) as listener:
        port = listener.getsockname()[1]
        return TCPStore(
            _LOOPBACK, port, is_master=True, wait_for_workers=False, timeout=datetime.timedelta(minutes=5),
            master_listen_fd=listener.detach(),
        )  # fmt: skip


def keep_to_loopback(environment: MutableMapping[str, str]) -> None:
    """Let ranks of one machine listen on its loopback alone, unless their user has chosen interfaces."""
    for variable, interface in _INTERFACES.items():
        environment.setdefault(variable, interface)

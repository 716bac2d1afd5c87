"""The rendezvous of one machine's ranks: a store of the launcher that only this machine reaches.

torchrun's own way is `--standalone` with the backend c10d. That store has no password and listens on every interface,
and torchrun unpickles its values, so anybody who can write to it can run code as the job's owner. Here the store
listens on loopback, and torchrun reads only JSON and counts from it. Several machines meet by torchrun's static
rendezvous, which unpickles nothing either. docs/security.md lists the trust that remains.
"""

from __future__ import annotations

import datetime
import os
import socket
import sys
import time
from collections.abc import Callable, MutableMapping
from contextlib import suppress
from functools import partial

from megamix.base.console import say
from megamix.base.machine import set_torch_environment
from megamix.config import ConfigError
from megamix.launch.exit_status import NoAnswerError


# These functions are defined above the imports of torch. At their end torch loads the entry point, which names a
# function of this module, and this module may be only half imported then.
def create_handler(params: rendezvous.RendezvousParameters) -> rendezvous.RendezvousHandler:
    """Make the rendezvous, for torchrun's registry. Raises: ValueError for several machines, or for an endpoint."""
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
    """Return `create_handler`. The entry point `torchrun.handlers` names this function."""
    return create_handler


from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # not in its __all__  # noqa: E402  # see there
from torch.distributed.elastic import rendezvous  # noqa: E402  # see create_handler
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous  # noqa: E402  # see create_handler

BACKEND = "loopback"  # torchrun --rdzv-backend=loopback

MEET_S = 600.0  # seconds within which machine 0 must listen: torch's own limit for those that wait there
_STORE_WAITS = datetime.timedelta(minutes=5)
QUIET_S = 20.0  # seconds of waiting for machine 0 without a line
_LOOPBACK = "127.0.0.1"
_ANY_PORT = "localhost:0"  # the endpoint of --standalone


class LoopbackRendezvous(StaticTCPRendezvous):
    """The handler that torchrun calls. There is one machine, whose agent holds the store as long as there are ranks.
    The base class answers torchrun's other questions as for a fixed number of nodes.
    """

    def __init__(self, run_id: str):
        super().__init__(_LOOPBACK, 0, rank=0, world_size=1, run_id=run_id, timeout=0)

    def get_backend(self) -> str:
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        return True  # False would let the first rank open its own store, on every interface

    def next_rendezvous(self) -> rendezvous.RendezvousInfo:
        keep_to_loopback(os.environ)  # the ranks inherit the environment
        store = _loopback_store()
        agents = PrefixStore("agent", store)  # the prefix keeps the agent's keys apart from the ranks' keys
        return rendezvous.RendezvousInfo(agents, 0, 1, rendezvous.RendezvousStoreInfo(_LOOPBACK, store.port))


def _loopback_store() -> TCPStore:
    with socket.create_server((_LOOPBACK, 0)) as listener:  # TCPStore itself would listen on every interface
        return TCPStore(
            _LOOPBACK,
            listener.getsockname()[1],
            is_master=True,
            wait_for_workers=False,
            timeout=_STORE_WAITS,
            master_listen_fd=listener.detach(),
        )


def meeting_of(machines: int, this: int, address: str, port: int) -> TCPStore:
    """Return the store in which the ranks of a job meet: of one machine on its loopback, of several on machine 0, which
    must hold it to the end. Raises: as `_require_meeting`.
    """
    if machines == 1:
        return _loopback_store()
    _require_meeting(address, port, listens=this == 0)
    return TCPStore(address, port, is_master=this == 0, wait_for_workers=False, timeout=_STORE_WAITS)


def leave_meeting(store: TCPStore, machines: int, this: int) -> None:
    """Leave it after a good end; machine 0 waits some minutes until the others have left."""
    with suppress(RuntimeError):  # machine 0 is gone
        store.set(f"megamix/machine {this} has left", "")
        if this == 0:
            store.wait([f"megamix/machine {other} has left" for other in range(machines)])


def torchrun(arguments: list[str]) -> None:
    """Run torchrun. Use our rendezvous where torchrun would choose c10d: with --standalone, and for one machine without
    settings of a rendezvous.
    """
    # Imported here and not above: a torchrun that a user starts loads this module by its entry point, while torchrun is
    # half imported.
    from torch.distributed.elastic.multiprocessing.errors import record
    from torch.distributed.run import determine_local_world_size, get_args_parser, parse_min_max_nnodes, run

    rendezvous.rendezvous_handler_registry.register(BACKEND, create_handler)
    args = get_args_parser().parse_args(arguments)
    nothing_said = args.rdzv_backend == "static" and not args.rdzv_endpoint and args.master_port is None
    if args.standalone or (nothing_said and parse_min_max_nnodes(args.nnodes)[1] == 1):
        args.standalone, args.rdzv_backend, args.rdzv_endpoint = False, BACKEND, _ANY_PORT
    elif args.rdzv_backend == "static":
        _require_meeting(args.master_addr, int(args.master_port or 29500), listens=args.node_rank == 0)
    set_torch_environment(determine_local_world_size(args.nproc_per_node))  # torchrun's own choice is one thread
    record(run)(args)


def _require_meeting(host: str, port: int, *, listens: bool) -> None:
    """Wait until machine 0's name has an address and machine 0 listens, because it may still be starting. `listens`:
    True on machine 0; there, check that the port is free.

    Raises: ConfigError for a port in use; NoAnswerError, because another start may find machine 0.
    """
    ask = partial(socket.getaddrinfo if listens else _connect, host, port)
    began_s, is_told = time.monotonic(), False
    while why := _refusal(ask):
        waited_s = time.monotonic() - began_s
        if waited_s > MEET_S:
            raise NoAnswerError(
                f"MASTER_ADDR: got {host}, where nobody listened at port {port} within {MEET_S:g} s ({why}); write "
                f"machine 0's name or address as all know it (getent hosts {host}), and start all machines"
            )
        if waited_s > QUIET_S and not is_told:
            is_told = True
            say(f"megamix: waiting for machine 0 at {host}:{port} ({why}), {MEET_S - waited_s:.0f} s left", sys.stderr)
        time.sleep(0.2)
    if listens and (why := _refusal(lambda: socket.create_server(("", port)).close())):
        told = f"MASTER_PORT: got {port}, at which nobody can listen on this machine, {host} ({why})"
        raise ConfigError(
            [
                f"{told}; end the process that has the port (ss -ltnp sport = :{port}), or write another port on all "
                "machines"
            ]
        )


def _connect(host: str, port: int) -> None:
    socket.create_connection((host, port), QUIET_S).close()


def _refusal(call: Callable[[], object]) -> str:
    """Make a call to the system. Return why it has failed; "" if it has succeeded."""
    try:
        call()
    except OSError as error:
        return os.strerror(error.errno) if error.errno and error.errno > 0 else str(error.strerror or error)
    return ""


def keep_to_loopback(environment: MutableMapping[str, str]) -> None:
    """Make the ranks of one machine listen on its loopback alone, unless the user has chosen interfaces.

    Without these variables Gloo and NCCL listen on the interface that the machine's name resolves to, if it does.
    """
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    environment.setdefault("GLOO_SOCKET_IFNAME", loopback)
    environment.setdefault("NCCL_SOCKET_IFNAME", f"={loopback}")  # without "=" NCCL reads a prefix of names

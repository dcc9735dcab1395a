"""The processes that train one model together: how one finds the others, by torch.distributed.

For the fsdp backend. Several models in one process (an actor and its critic) use one group, which ends with the last of
them. Where it listens is the address that the executor gave, and nothing beside it.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, Store, TCPStore

from rollstock import Device, UserError

_INTERFACE = "GLOO_SOCKET_IFNAME"
_users = 0


def join(device: Device[Any], *, rank: int, world_size: int, timeout_s: float) -> None:
    """Meet the other processes; `leave` is to be called once for it.

    Raises UserError if the executor did not say where, or if this process belongs to a group of another size already.
    """
    global _users
    if not dist.is_initialized():
        store = HashStore() if world_size == 1 else _store(rank, world_size, timedelta(seconds=timeout_s))
        with on_loopback():
            dist.init_process_group(
                _backend(device), store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout_s)
            )
        _users = 1
        return
    if (dist.get_rank(), dist.get_world_size()) != (rank, world_size):
        raise UserError(
            f"backend fsdp: this process is number {dist.get_rank()} of {dist.get_world_size()} that work together, "
            f"and cannot be number {rank} of {world_size} as well: give roles that share processes (colocate_with) "
            "the same count, or processes of their own"
        )
    if _users:  # otherwise the group is somebody else's to end
        _users += 1


def leave() -> None:
    """Be done with the group."""
    global _users
    if _users == 1 and dist.is_initialized():
        _forget_layouts()
        dist.destroy_process_group()
    _users = max(0, _users - 1)


def _forget_layouts() -> None:
    """Empty the caches in which torch keeps how tensors were spread, and with it their group, for as long as the thread
    lives. A process forked from another thread would end that group, and wait for ever for threads that it has not."""
    from torch.distributed.tensor import debug

    clear = getattr(debug, "_clear_sharding_prop_cache", None)
    if clear is not None:
        clear()


@contextlib.contextmanager
def on_loopback() -> Iterator[None]:
    """Around the making of a group: where the processes meet on this machine alone, gloo shall listen there alone."""
    name = _loopback_name()
    if name is None or _INTERFACE in os.environ or not _is_loopback(os.environ.get("MASTER_ADDR", "127.0.0.1")):
        yield
        return
    os.environ[_INTERFACE] = name
    try:
        yield
    finally:
        del os.environ[_INTERFACE]


def _backend(device: Device[Any]) -> str:
    """The collectives of the device, and of the CPU beside it, where weights may be."""
    name, kind = device.collective_backend, device.torch_device().type
    return name if kind == "cpu" else f"cpu:{dist.Backend.default_device_backend_map['cpu']},{kind}:{name}"


def _store(rank: int, world_size: int, timeout: timedelta) -> Store:
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise UserError(
            f"backend fsdp: {world_size} processes are to train together, but {' and '.join(missing)} are not set, "
            "which say where they meet: choose an executor that starts processes, such as ray"
        )
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if rank:
        return TCPStore(address, port, world_size, is_master=False, timeout=timeout)
    # By itself, the store would listen on all addresses of the machine.
    family = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0][0]
    listener = socket.create_server((address, port), family=family)
    return TCPStore(address, port, world_size, is_master=True, timeout=timeout, master_listen_fd=listener.detach())


def _is_loopback(address: str) -> bool:
    return address == "localhost" or address == "::1" or address.startswith("127.")


def _loopback_name() -> str | None:
    return next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)

"""Ray itself: started on this machine or joined, kept quiet, and ended again.

For the `ray` executor. A Ray that somebody has started in this process before is used and left as it is.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from rollstock import ConfigError, RunError, import_optional, suggest
from rollstock.plugins.executors._guard import Guard

if TYPE_CHECKING:
    from rollstock.plugins.executors.ray import Ray, RayConfig

logger = logging.getLogger(__name__)

# Read by Ray when it is started. Its statistics are the user's to give, and a warning about a change that is to come
# helps nobody here.
_QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
# The same, for as long as Ray starts: no process for each core beforehand, since every worker gets one of its own, and
# workers that are not less urgent than everything else on the machine (Ray's own default is a niceness of 15).
_STARTING = {
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_worker_niceness": "0",
}
# Read when it is imported, and wrong afterwards. One machine has no business on the network: with the first, whose name
# speaks of other systems, every part of Ray listens on the loopback device alone. The second is Ray's default for a
# cluster of one, said aloud, so that Ray does not.
_LOCAL = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_AUTH_MODE": "token"}
_KNOCK_S = 10.0  # for a cluster's port to be reached, and to say what it is
# How whoever speaks HTTP/2, and with it gRPC, begins: the client with a fixed line and its settings, none here; the
# server with settings of its own, in a frame of the type 4 (RFC 9113, sections 3.4, 4.1 and 6.5).
_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
_FRAME_HEADER, _SETTINGS = 9, 4


class _ToLog(logging.Handler):
    """Puts what Ray would print into the controller's log."""

    def emit(self, record: logging.LogRecord) -> None:
        logger.info("Ray: %s", record.getMessage())


class Cluster:
    """The connection of this process to Ray."""

    def __init__(
        self,
        ray: Any,
        *,
        is_private: bool = False,
        dashboard: str = "",
        ends: contextlib.ExitStack | None = None,
        guard: Guard | None = None,
    ) -> None:
        """`ends`: what is to be undone at the end; None where this process had joined Ray before. `guard`: of a Ray
        that was started here."""
        self.ray = ray
        self.is_private = is_private
        """Whether it was started for this run alone, and does not count the cores that workers use."""
        self.dashboard = dashboard
        self._ends = ends
        self._guard = guard

    @classmethod
    def connect(cls, config: RayConfig, *, needed_by: Ray) -> Cluster:
        """Join the cluster at `address` (or RAY_ADDRESS), or start Ray on this machine.

        Raises PluginError if Ray is not installed, ConfigError if nothing answers there, RunError if it does not start.
        """
        address = config.address or _from_environment()
        is_early = not address and "ray" not in sys.modules
        for name, value in {**_QUIET, **(_LOCAL if is_early else {})}.items():
            os.environ.setdefault(name, value)
        ray: Any = import_optional("ray", needed_by=needed_by)
        if ray.is_initialized():
            logger.info("using the Ray that runs in this process already")
            return cls(ray)
        ends = contextlib.ExitStack()
        guard = None
        try:
            ends.enter_context(_logged())
            if not address:
                guard = Guard()
                ends.callback(guard.close)
            if address:
                _knock(address)
            elif config.temp_directory:
                os.makedirs(config.temp_directory, exist_ok=True)
            _check_environment(config.runtime_env)
            ends.callback(ray.shutdown)  # of a start, too, that fails when half of it is done
            with _set_for_now(_STARTING):
                context = ray.init(address=address or "local", **_arguments(config, starts=not address))
            _hush(ray)
        except Exception as error:
            ends.close()
            raise _explained(error, config, address) from error
        if guard is not None:
            guard.watch()
        dashboard = str(getattr(context, "dashboard_url", "") or "")
        return cls(ray, is_private=not address and config.num_cpus is None, dashboard=dashboard, ends=ends, guard=guard)

    def watch(self) -> None:
        """Processes were started: if Ray was started here, let none of them outlive this one, however it ends."""
        if self._guard is not None:
            self._guard.watch()

    def close(self) -> None:
        """End what was started, or leave what was joined."""
        if self._ends is not None:
            self._ends.close()


def _explained(error: Exception, config: RayConfig, address: str) -> Exception:
    """What went wrong as the user's to mend, where it is."""
    if address and isinstance(error, ConnectionError):
        return ConfigError(
            f"{'executor.address' if config.address else 'RAY_ADDRESS'}: no Ray cluster answers at {address!r} "
            f"({_line(error)}). `ray status --address {address}` should list its nodes; leave the address out to start "
            "Ray on this machine"
        )
    if isinstance(error, (ValueError, TypeError)):
        return ConfigError(f"executor: Ray refuses these options: {_line(error)}")
    if isinstance(error, OSError) and config.temp_directory is not None:
        return ConfigError(
            f"executor.temp_directory: Ray cannot keep its files in {config.temp_directory!r} ({_line(error)}); choose "
            "another directory, or leave it out"
        )
    return RunError(f"Ray cannot be {'joined' if address else 'started'}: {_line(error)}")


def check_address(address: str) -> None:
    """Raise ValueError unless an address is one of a cluster that can be joined from a machine of its own."""
    if "://" in address:
        raise ValueError(
            f"`address` {address!r} is one of Ray's client, which keeps the run apart from the object store: start the "
            "run on a machine of the cluster, with `auto`"
        )
    host, _, port = address.rpartition(":")
    if address != "auto" and not (host and port.isdecimal() and 0 < int(port) < 65536):
        raise ValueError(f"`address` {address!r} is neither `auto` nor host:port")


def _from_environment() -> str:
    """The address in RAY_ADDRESS; empty if there is none, or Ray is to be started here."""
    address = os.environ.get("RAY_ADDRESS", "")
    if address in ("", "local"):
        return ""
    try:
        check_address(address)
    except ValueError as error:
        raise ConfigError(f"RAY_ADDRESS: {error}".replace("`address` ", "")) from None
    return address


def _knock(address: str) -> None:
    """Raise ConnectionError if nobody listens where Ray would look for the cluster, or somebody else does: Ray tries
    for many minutes, and then ends the process. What speaks no gRPC is found within seconds, and what does within
    the time of one attempt of Ray's, which is less than a minute."""
    from ray import _raylet
    from ray._private.services import canonicalize_bootstrap_address_or_die
    from ray.exceptions import RpcError

    native: Any = _raylet  # compiled, and without types
    found = canonicalize_bootstrap_address_or_die(address)
    host, _, port = found.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_KNOCK_S) as connection:
            if os.environ.get("RAY_USE_TLS", "0").lower() not in ("1", "true"):
                _greet(connection)
    except OSError as error:
        raise ConnectionError(f"{found}: {error.strerror or error}") from error
    try:
        native.GcsClient(address=found)
    except RpcError as error:  # a token that is missing or wrong is another error, which says what to do
        raise ConnectionError(f"{found}: what listens there is no head of a cluster: {error}") from error


def _greet(connection: socket.socket) -> None:
    """Raise ConnectionError unless HTTP/2 is spoken at the other end, in time."""
    until, answer = time.monotonic() + _KNOCK_S, b""
    connection.sendall(_GREETING)
    while len(answer) < _FRAME_HEADER:
        connection.settimeout(max(1e-3, until - time.monotonic()))
        try:
            more = connection.recv(_FRAME_HEADER - len(answer))
        except TimeoutError:
            raise ConnectionError(f"what listens there did not say within {_KNOCK_S:g} s what it is") from None
        if not more:
            break
        answer += more
    if len(answer) < _FRAME_HEADER or answer[3] != _SETTINGS:
        raise ConnectionError(f"what listens there is not Ray: it answers {answer!r}")


def _check_environment(given: Mapping[str, Any]) -> None:
    """Raise ValueError for a part of a runtime environment that Ray would leave out without a word."""
    from ray.runtime_env import RuntimeEnv

    known = {name for name in RuntimeEnv.known_fields if not name.startswith("_")} | {"nsight"}
    for name in given:
        if not (name.startswith("_") or name in known or "RAY_RUNTIME_ENV_PLUGINS" in os.environ):
            raise ValueError(f"runtime_env has no part {name!r}. {suggest(name, sorted(known))}")


def _arguments(config: RayConfig, *, starts: bool) -> dict[str, Any]:
    given: dict[str, Any] = {
        "namespace": config.namespace,
        "runtime_env": config.runtime_env or None,
        "logging_level": logging.WARNING,  # without it, Ray takes the handlers off its loggers
        "log_to_driver": False,
    }
    if starts:
        given |= {
            "num_cpus": config.num_cpus,
            "object_store_memory": config.object_store_memory,
            "_plasma_directory": config.plasma_directory,
            "_temp_dir": config.temp_directory,
            "include_dashboard": None if config.dashboard else False,
            "dashboard_port": config.dashboard_port,
        }
    return given


@contextlib.contextmanager
def _logged() -> Iterator[None]:
    """Whatever Ray's Python side says goes to the log and not to the terminal."""
    log = logging.getLogger("ray")
    handlers, propagate, level = list(log.handlers), log.propagate, log.level
    log.handlers[:], log.propagate = [_ToLog(logging.WARNING)], False
    try:
        yield
    finally:
        log.handlers[:], log.propagate = handlers, propagate
        log.setLevel(level)


def _hush(ray: Any) -> None:
    """End the thread in which Ray prints what its other processes say of errors, such as a worker that was killed: the
    executor raises them. There is no option for it, and it prints to standard output, where `--json` puts results."""
    with contextlib.suppress(AttributeError):
        worker = ray._private.worker.global_worker
        worker.threads_stopped.set()
        worker.gcs_error_subscriber.close()


@contextlib.contextmanager
def _set_for_now(variables: Mapping[str, str]) -> Iterator[None]:
    """Variables that the user has not set, set within."""
    names = [name for name in variables if name not in os.environ]
    os.environ.update({name: variables[name] for name in names})
    try:
        yield
    finally:
        for name in names:
            del os.environ[name]


def _line(error: BaseException) -> str:
    return textwrap.shorten(str(error), 400, placeholder=" ...") or type(error).__name__

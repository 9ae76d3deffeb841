"""The process of a server: its port, its signals, and its end."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import math
import resource
import signal
import socket
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any

import h11
import uvicorn

from ggpipe.api.engine_thread import EngineThread
from ggpipe.engine.signals import Signals
from ggpipe.errors import SettingError, Terminated
from ggpipe.options.server import ServerConfig
from ggpipe.server import half_closed
from ggpipe.server.app import application
from ggpipe.server.endpoints.shared import Server, Serving
from ggpipe.server.receiving import BodyReader
from ggpipe.server.saved_slots import SavedSlots

_LAST_WORDS_S = 2
"""Seconds for closing connections after all requests were answered."""
_KILLS_S = 1.0
"""Open MPI's mpirun sends SIGCONT, SIGTERM and SIGKILL, a quarter of a second apart."""
_OWN_FILES, _ENOUGH_FILES, _FEWEST_CONNECTIONS, _MOST_ACCEPTED = 48, 16384, 8, 1024
_MOST_HEADER_BYTES = 64 * 1024
_MOST_UNSENT_BYTES = 128 * 1024
"""Buffered by the kernel for a client that does not read."""


def listen(config: ServerConfig) -> list[socket.socket]:
    """A listening socket for each address. If any port will do, all use the same one. Raises SettingError if listening
    fails."""
    listeners: list[socket.socket] = []
    try:
        for host in config.hosts:
            port = listeners[0].getsockname()[1] if listeners else config.port
            listeners.append(_listener(config, host, port))
    except SettingError:
        for listener in listeners:
            listener.close()
        raise
    return listeners


def _listener(config: ServerConfig, host: str, port: int) -> socket.socket:
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[
            0
        ]
    except (OSError, UnicodeError) as e:
        raise SettingError("host", f"{host}: no such address: {e}") from e
    listener = socket.socket(family, kind)
    try:
        if family == socket.AF_INET6:  # so that `::` and `0.0.0.0` can have the same port
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, len(config.hosts) > 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MOST_UNSENT_BYTES)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, math.ceil(1e3 * config.client_limit_s))
        listener.bind(address)
        listener.listen(1024)
    except OSError as e:
        listener.close()
        raise SettingError("port", f"{port}: cannot listen on {host}: {e.strerror}") from e
    return listener


def url(config: ServerConfig, listener: socket.socket) -> str:
    """The server's URL for clients."""
    host, port = listener.getsockname()[:2]
    scheme = "https" if config.ssl_cert_file is not None else "http"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}{config.api_prefix}"


def _is_on_loopback(listener: socket.socket) -> bool:
    return ipaddress.ip_address(listener.getsockname()[0].partition("%")[0]).is_loopback


def serve(
    serving: Serving,
    listeners: Sequence[socket.socket],
    thread: EngineThread,
    on_loaded: Callable[[], None],
    signals: Signals | None = None,
) -> None:
    """Serve until SIGTERM or Ctrl-C; a second signal cuts off running requests.

    `signals`: those of the first rank, if the user started the ranks. Then SIGUSR1 works like SIGTERM, and a SIGTERM of
    Open MPI's mpirun, which kills all ranks a moment later, cuts off running requests.

    Raises the engine's error if it ended with one, and SettingError for unusable HTTPS files. Closes the engine.
    """
    try:
        with contextlib.ExitStack() as closing:
            for listener in listeners:
                closing.enter_context(listener)
            asyncio.run(_serve(serving, listeners, thread, on_loaded, signals))
    finally:
        thread.close()


def _connections(wanted: int) -> int:
    """How many connections may exist, at most `wanted`. Half of the files that this process may open are left for
    restarting ranks."""
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= limit < _ENOUGH_FILES:
        limit = _ENOUGH_FILES if most == resource.RLIM_INFINITY else min(_ENOUGH_FILES, most)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, most))
    free = (limit if limit >= 0 else _ENOUGH_FILES) - _OWN_FILES
    return min(wanted, max(free // 2, _FEWEST_CONNECTIONS))


class _Uvicorn(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are handled by `_serve`, which lets running requests finish."""
        yield


async def _serve(
    serving: Serving,
    listeners: Sequence[socket.socket],
    thread: EngineThread,
    on_loaded: Callable[[], None],
    signals: Signals | None,
) -> None:
    config = serving.config
    backend = serving.make_backend(thread)
    saved_slots = SavedSlots(backend, serving.slot_save_path)
    bodies = BodyReader(config.max_body_mib, config.timeout_s)
    server = Server(**vars(serving), backend=backend, bodies=bodies, saved_slots=saved_slots)
    n_connections = _connections(config.n_connections)
    settings = uvicorn.Config(
        application(server, serving.keys, all(map(_is_on_loopback, listeners))),
        http=half_closed.Protocol,
        backlog=min(n_connections, _MOST_ACCEPTED),
        limit_concurrency=n_connections,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        h11_max_incomplete_event_size=_MOST_HEADER_BYTES,
        timeout_keep_alive=math.ceil(config.client_limit_s),
        timeout_graceful_shutdown=_LAST_WORDS_S,
        ssl_keyfile=config.ssl_key_file,
        ssl_certfile=config.ssl_cert_file,
    )
    try:
        settings.load()
    except OSError as e:  # ssl.SSLError is one
        raise SettingError("ssl_cert_file", f"{config.ssl_cert_file}: cannot use it: {e.strerror or e}") from e
    http = _Uvicorn(settings)
    is_ending, is_cut_off = asyncio.Event(), asyncio.Event()

    def end() -> None:
        if is_ending.is_set():
            is_cut_off.set()
            backend.cut_off()
        is_ending.set()

    loop = asyncio.get_running_loop()
    loop.set_exception_handler(_note_error)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, end)
    if signals is not None:
        _follow_mpirun(loop, signals, thread, end)

    async def drain() -> None:
        await is_ending.wait()
        if not thread.loaded.has_ended:  # nothing is running yet
            thread.stop()
        await backend.drain(config.timeout_s)
        if config.keep_slots and thread.loaded.has_ended:
            await _until(is_cut_off, saved_slots.keep())

    async def load() -> None:
        await backend.load(saved_slots.bring_back if config.keep_slots else None)
        on_loaded()

    async def fail() -> None:
        raise await backend.failed()

    running = asyncio.create_task(http.serve([*listeners]))
    ending = asyncio.create_task(drain())
    failing = asyncio.create_task(fail())
    loading = asyncio.create_task(load())
    ends, tasks = (running, ending, failing), (running, ending, failing, loading)
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if loading.done() and loading.exception() is None:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        http.should_exit = True
        await running
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in (failing, loading):
        if not task.cancelled() and not is_ending.is_set():
            task.result()


def _note_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Ignore invalid HTTP that arrives during an answer, which uvicorn treats as a bug."""
    if not isinstance(context.get("exception"), h11.LocalProtocolError):
        loop.default_exception_handler(context)


async def _until(is_cut_off: asyncio.Event, work: Coroutine[None, None, None]) -> None:
    """Do the work unless it is cut off."""
    tasks = (asyncio.create_task(work), asyncio.create_task(is_cut_off.wait()))
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _follow_mpirun(
    loop: asyncio.AbstractEventLoop, signals: Signals, thread: EngineThread, end: Callable[[], None]
) -> None:
    """mpirun sends SIGTERM when it is asked to end, and when a rank has died."""
    continued_s = -math.inf

    def on_continue() -> None:
        nonlocal continued_s
        continued_s = loop.time()
        signals.signalled(signal.SIGCONT)

    def on_terminate() -> None:
        signals.signalled(signal.SIGTERM)
        asking = loop.run_in_executor(None, signals.gone)
        asking.add_done_callback(lambda done: on_gone(done.result()))

    def on_gone(gone: str) -> None:
        if gone:
            thread.fail(Terminated(f"{gone}; only ranks that ggpipe started itself are restarted"))
            return
        end()
        if loop.time() < continued_s + _KILLS_S:
            end()

    loop.add_signal_handler(signal.SIGCONT, on_continue)
    loop.add_signal_handler(signal.SIGTERM, on_terminate)
    loop.add_signal_handler(signal.SIGUSR1, end)

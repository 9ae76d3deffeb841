"""The server's process: its port, its engine, and its end."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import uvicorn

from ggpipe.api.engine_thread import EngineThread
from ggpipe.errors import GgpipeError, SettingError
from ggpipe.options.chat import Chat
from ggpipe.options.server import ServerConfig
from ggpipe.server.app import Server, application
from ggpipe.server.backend import Backend

_LAST_WORDS_S = 2
"""For connections to be closed, once all is answered."""
_MOST_HEADER_BYTES = 64 * 1024


@dataclass(frozen=True, kw_only=True)
class Serving:
    """What is served, and to whom."""

    config: ServerConfig
    chat: Chat
    model: str
    path: str
    keys: tuple[str, ...]
    backend: Callable[[EngineThread], Backend]
    """Makes what the endpoints use; called in the event loop."""


def listen(config: ServerConfig) -> socket.socket:
    """The port, open. Raises SettingError where that cannot be."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as e:
        raise SettingError(f"`host` {config.host}: no such address: {e}") from e
    listener = socket.socket(family, kind)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(1024)
    except OSError as e:
        listener.close()
        raise SettingError(f"`port` {config.port}: cannot listen on {config.host}: {e.strerror}") from e
    return listener


def url(config: ServerConfig, listener: socket.socket) -> str:
    """Where clients find it."""
    host, port = listener.getsockname()[:2]
    scheme = "https" if config.ssl_cert_file is not None else "http"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def serve(serving: Serving, listener: socket.socket, thread: EngineThread, on_loaded: Callable[[], None]) -> None:
    """Answer clients until SIGTERM or Ctrl-C; a second one cuts off what is being answered.

    Raises what the engine ended with, SettingError for files of HTTPS that cannot be used. The engine is closed.
    """
    try:
        with contextlib.closing(listener):
            asyncio.run(_serve(serving, listener, thread, on_loaded))
    finally:
        thread.close()


class _Uvicorn(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are looked after here: running requests end first."""
        yield


async def _serve(
    serving: Serving, listener: socket.socket, thread: EngineThread, on_loaded: Callable[[], None]
) -> None:
    config = serving.config
    backend = serving.backend(thread)
    server = Server(backend=backend, config=config, chat=serving.chat, model=serving.model, path=serving.path)
    settings = uvicorn.Config(
        application(server, serving.keys),
        http="h11",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        h11_max_incomplete_event_size=_MOST_HEADER_BYTES,
        timeout_graceful_shutdown=_LAST_WORDS_S,
        ssl_keyfile=config.ssl_key_file,
        ssl_certfile=config.ssl_cert_file,
    )
    try:
        settings.load()
    except OSError as e:  # ssl.SSLError is one
        raise SettingError(f"`ssl_cert_file` {config.ssl_cert_file}: cannot use it: {e.strerror or e}") from e
    http = _Uvicorn(settings)
    is_ending = asyncio.Event()

    def end() -> None:
        if is_ending.is_set():
            backend.cut_off()
        is_ending.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, end)

    async def drain() -> None:
        await is_ending.wait()
        if not thread.loaded.has_ended:  # nothing runs yet
            thread.stop()
        await backend.drain(config.timeout_s)

    async def load() -> None:
        await backend.load()
        on_loaded()

    running = asyncio.create_task(http.serve([listener]))
    ending = asyncio.create_task(drain())
    failing = asyncio.create_task(backend.failed())
    loading = asyncio.create_task(load())
    tasks = (running, ending, failing, loading)
    try:
        await asyncio.wait((running, ending, failing), return_when=asyncio.FIRST_COMPLETED)
        http.should_exit = True
        await running
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    if failing.done() and not failing.cancelled() and not is_ending.is_set():
        error: GgpipeError = failing.result()
        raise error

"""libllama and the native extension, loaded once and in the right order, with their logs caught.

llama_cpp comes first: the wheel holds its libraries under several names, and an extension that needed one under
another name than llama_cpp opens would put two of everything into the process.
"""

from __future__ import annotations

import collections
import ctypes
import importlib.util
import os
import re
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

# libgomp reads this once, when it is loaded: its threads spin a little between operators (a futex sleep there
# costs more than the wait) but not from one run to the next, where other ranks need the core.
os.environ.setdefault("GOMP_SPINCOUNT", "20000")


class _Bindings(types.ModuleType):
    """The package llama_cpp before anything but its low-level module `llama_cpp.llama_cpp` is wanted: the rest, with
    jinja2 and more, takes four times as long to load, and is loaded when one of its names is looked up."""

    def __getattr__(self, name: str) -> Any:
        self.__class__ = types.ModuleType  # type: ignore[assignment]
        assert self.__spec__ is not None
        assert self.__spec__.loader is not None
        self.__spec__.loader.exec_module(self)
        if _started:
            lib.llama_log_set(_log_callback, ctypes.c_void_p(0))  # it has set its own
        return getattr(self, name)


if "llama_cpp" not in sys.modules and (_spec := importlib.util.find_spec("llama_cpp")) is not None:
    _package = importlib.util.module_from_spec(_spec)
    _package.__class__ = _Bindings
    sys.modules["llama_cpp"] = _package

import llama_cpp.llama_cpp as lib  # noqa: E402

import ggpipe._native as native  # noqa: E402

__all__ = ["ggml", "last_error", "lib", "logged_errors", "native", "on_abort", "set_log_level", "start"]

_level = 5
_started = _numa_started = False
_starting = threading.Lock()


class _Log(threading.local):
    """What libllama logged in one thread: stages of one process must not take each other's errors."""

    def __init__(self) -> None:
        self.errors: collections.deque[str] = collections.deque(maxlen=20)
        self.last_level = 0


_log = _Log()


def _on_log(level: int, text: bytes, _data: object) -> None:
    level = _log.last_level if level == 5 else level  # 5 continues the last line
    _log.last_level = level
    line = text.decode("utf-8", "replace")
    if level == 4:
        _log.errors.append(" ".join(line.split()))
    if level >= _level:
        sys.stderr.write(line)


_ABORT_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_char_p)
_abort_callback: object = None
_log_callback = lib.llama_log_callback(_on_log)


def ggml(name: str, result: Any, *arguments: Any) -> Any:
    """A function of ggml's, which llama_cpp does not declare, with the types of its result and its arguments."""
    function = getattr(lib._lib, name)  # libllama needs ggml, so its handle finds ggml's functions too
    function.restype, function.argtypes = result, arguments
    return function


def set_log_level(level: int) -> None:
    """Pass libllama's messages of this level and above to stderr: 1 debug, 2 info, 3 warn, 4 error, 5 none."""
    global _level
    _level = level


def logged_errors() -> list[str]:
    """Errors that libllama logged in this thread since the last call, oldest first."""
    lines = list(_log.errors)
    _log.errors.clear()
    return lines


def last_error() -> str:
    """The first of those lines, for a message of ours."""
    lines = logged_errors()
    return lines[0].rstrip(".") if lines else "libllama gives no reason"


def on_abort(tell: Callable[[str], None]) -> None:
    """Have `tell` called, from any thread, before ggml ends this process because an assertion does not hold.

    It gets the place and the reason. Without it ggml starts a debugger for a backtrace.
    """
    global _abort_callback

    def call(reason: bytes) -> None:
        tell(re.sub(r"^\S*/", "", reason.decode("utf-8", "replace")))

    _abort_callback = _ABORT_CALLBACK(call)
    lib._lib.ggml_set_abort_callback(_abort_callback)


def start(numa: str | None = None) -> None:
    """Initialise libllama, and NUMA with this NUMA strategy: each once a process, by the first call that asks.

    Headers are read, which needs libllama, before anybody knows of a strategy.
    """
    global _started, _numa_started
    with _starting:  # the head reads its vocabulary while its stage loads
        if not _started:
            lib.llama_log_set(_log_callback, ctypes.c_void_p(0))
            lib.llama_backend_init()
            _started = True
        if numa is not None and not _numa_started:
            strategies = {"distribute": 1, "isolate": 2, "numactl": 3}
            lib.llama_numa_init(strategies[numa])
            _numa_started = True

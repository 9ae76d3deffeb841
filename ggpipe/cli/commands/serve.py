"""`ggpipe serve`: OpenAI's API over HTTP."""

from __future__ import annotations

import functools
import logging
import re
import sys

from ggpipe.api.engine_thread import EngineThread
from ggpipe.cli.messages import show, warn
from ggpipe.errors import GgpipeError, LaunchError, UsageError
from ggpipe.launch import environment
from ggpipe.options.chat import Chat
from ggpipe.options.engine_config import engine_config, speculation_config, warnings_of
from ggpipe.options.grammar import Constraint
from ggpipe.options.option import Options
from ggpipe.options.sampling import sampling_config
from ggpipe.options.server import ServerConfig
from ggpipe.options.settings import Models, Prompt
from ggpipe.options.table import COMMANDS, OPTIONS
from ggpipe.sampling import SamplingConfig

_NAMES = {"n_requests": "n_slots", "n_parallel": "n_branches"}
"""Settings of the ranks that have another name here."""
_RANK = next(command for command in COMMANDS if command.name == "rank")


def run(options: Options) -> int:
    """Serve until it is ended. The exit code."""
    if environment.is_rank():
        raise LaunchError("`ggpipe serve` starts its ranks itself: name them with `shares`, without mpirun or srun")
    try:
        from ggpipe.server import backend, process
    except ModuleNotFoundError as e:
        raise UsageError(f"`ggpipe serve` needs {e.name}: install ggpipe with the extra `server`") from e
    server, prompt = options[ServerConfig], options[Prompt]
    of_engine = options.of(_RANK, OPTIONS, _NAMES)
    try:
        config, speculation = engine_config(of_engine), speculation_config(of_engine)
    except GgpipeError as e:
        raise _named(e) from None
    usual = functools.partial(sampling_config, options)
    usual(SamplingConfig())  # mistakes show at once
    path = options[Models].target
    assert path is not None  # it is required
    serving = process.Serving(
        config=server,
        chat=_chat(options),
        model=server.alias or path.name,
        path=str(path),
        keys=server.keys(),
        backend=lambda thread: backend.Backend(
            thread, usual, prompt.n_predict, speculation, server.n_slots, server.n_waiting
        ),
    )
    for warning in warnings_of(of_engine):
        warn(warning)
    _log()
    listener = process.listen(server)
    url = process.url(server, listener)
    show(f"listening on {url}; loading {path}")
    thread = EngineThread(config, of_engine.without(SamplingConfig, Constraint, Prompt), show, _named)
    process.serve(serving, listener, thread, lambda: show(f"ready: {url}/v1"))
    return 0


def _chat(options: Options) -> Chat:
    chat = Chat(single_turn=True, **options.fields(Chat))
    chat.of_messages([])  # reads the template
    return chat


def _named(error: GgpipeError) -> GgpipeError:
    """The same error with this command's names of settings. They become flags on the terminal, and fields of bodies in
    answers."""
    own = type(error)(re.sub(r"`(\w+)`", lambda found: f"`{_NAMES.get(found[1], found[1])}`", str(error)))
    own.__cause__ = error.__cause__
    return own


def _log() -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("ggpipe: %(message)s"))
    log = logging.getLogger("ggpipe.server")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    logging.getLogger("uvicorn").setLevel(logging.CRITICAL)

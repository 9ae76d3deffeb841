"""`ggpipe serve`: OpenAI's and llama-server's APIs over HTTP."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

from ggpipe.api.engine_thread import EngineThread
from ggpipe.cli.launching import NO_RESTART, check_model_files
from ggpipe.cli.messages import in_flags, report, warn
from ggpipe.cli.ranks import run_this_rank
from ggpipe.config.engine import EngineConfig
from ggpipe.config.speculation import SpeculationConfig
from ggpipe.engine.signals import Signals
from ggpipe.errors import GgpipeError, Setting, SettingError, UsageError, Wording
from ggpipe.launch import environment
from ggpipe.launch.rank_setup import RankSetup
from ggpipe.options.chat import ChatSettings
from ggpipe.options.commands import ENGINE
from ggpipe.options.engine_config import engine_config, speculation_config, warnings_of
from ggpipe.options.option import Options
from ggpipe.options.sampling import sampling_config
from ggpipe.options.server import ServerConfig
from ggpipe.options.settings import EmbeddingSettings, LogSettings, ModelSettings, PromptSettings, RankSettings
from ggpipe.options.table import OPTIONS

if TYPE_CHECKING:
    from ggpipe.engine.head import Head

_NAMES = {"n_requests": "n_slots", "n_parallel": "n_branches"}
"""Settings of the ranks that have other names in this command."""
_ENDS_S = 10.0  # in addition to the time for running requests


def run(options: Options, on_start: Callable[[EngineThread], None] = lambda _: None) -> int:
    """Serve until stopped, or be one of the ranks. `on_start` gets the engine while it loads. Returns the exit code."""
    of_engine = options.of(ENGINE, OPTIONS, _NAMES)
    try:
        config, speculation = engine_config(of_engine), speculation_config(of_engine)
    except GgpipeError as e:
        raise e.renamed(_NAMES) from None
    sampling_config(options)  # to find mistakes now
    if not environment.is_rank():
        return _serve(options, config, speculation, of_engine, on_start)
    given = _GivenRanks(config, options)
    if not environment.has_user():
        return given.run(_not_the_head)
    if options[RankSettings].restart and options.is_given("restart"):
        warn(NO_RESTART)
    try:
        return _serve(options, config, speculation, of_engine, on_start, given)
    except GgpipeError as e:
        if given.has_begun:
            e.is_reported = e.is_reported or given.has_reported
            raise
        error = e
    return given.run(functools.partial(_refuse, error))  # so that the other ranks exit


class _GivenRanks:
    """This process as one of the ranks that the user has started with mpirun or srun."""

    def __init__(self, config: EngineConfig, options: Options) -> None:
        timeout_s = options[ServerConfig].timeout_s
        self.signals = Signals(environment.rank_in_environment() or 0, server_ends_s=timeout_s + _ENDS_S)
        self.has_begun = self.has_reported = False
        self._config = config
        self._verbose = options[LogSettings].verbose

    def run(self, head: Callable[[Head], int]) -> int:
        """Be a rank. Suitable as `first_rank` of EngineThread."""

        def reporting(own: Head) -> int:
            try:
                return head(own)
            except GgpipeError as e:
                self._report(e)  # before the ranks exit: mpirun may leave no time afterwards
                raise

        self.has_begun = True
        return run_this_rank(self._config, reporting, self._verbose, self._report, self.signals)

    def _report(self, error: GgpipeError) -> None:
        report(error.renamed(_NAMES))
        error.is_reported = self.has_reported = True


def _serve(
    options: Options,
    config: EngineConfig,
    speculation: SpeculationConfig,
    of_engine: Options,
    on_start: Callable[[EngineThread], None],
    given: _GivenRanks | None = None,
) -> int:
    """`given`: the ranks of which this process is the first, if the user has started them."""
    try:
        from ggpipe.server import backend, log, process
        from ggpipe.server.endpoints.shared import Serving
        from ggpipe.server.saved_slots import check_folder
    except ModuleNotFoundError as e:
        raise UsageError(f"`ggpipe serve` needs {e.name}: run pip install 'ggpipe[server]'") from e
    server, prompt = options[ServerConfig], options[PromptSettings]
    if server.keep_slots and config.slot_save_path is None:
        raise SettingError("keep_slots", "needs a folder", Wording("name it with ", Setting("slot_save_path")))
    if config.slot_save_path is not None:
        check_folder(config.slot_save_path)
    usual = functools.partial(sampling_config, options)
    path = options[ModelSettings].target
    assert path is not None  # a required option
    serving = Serving(
        config=server,
        chat=_chat(options),
        embeddings=options[EmbeddingSettings],
        model=(*server.aliases, path.name)[0],
        path=str(path),
        keys=server.keys(),
        make_backend=lambda thread: backend.Backend(
            thread, usual, prompt.n_predict, speculation, server.n_slots, server.n_waiting
        ),
        slot_save_path=config.slot_save_path,
        verbose=options[LogSettings].verbose,
    )
    log.begin(server)

    def say(line: str | Wording) -> None:
        log.say(in_flags(line))

    for warning in warnings_of(of_engine):
        say(Wording("warning: ", warning))
    if given is None:
        check_model_files(config, options[RankSettings].hostfile)
    listeners = process.listen(server)
    urls = [process.url(server, listener) for listener in listeners]
    url = urls[0]
    say(f"listening on {' and '.join(urls)}; loading {path}")
    settings, first_rank = (
        RankSetup(config=config, verbose=options[LogSettings].verbose),
        given.run if given is not None else None,
    )
    thread = EngineThread(settings, options[RankSettings], say, _NAMES, first_rank)
    on_start(thread)

    def on_loaded() -> None:
        say(f"ready: {url}/v1")
        environment.notify_systemd(f"READY=1\nSTATUS=serving {url}")

    signals = given.signals if given is not None else None
    try:
        process.serve(serving, listeners, thread, on_loaded, signals)
    except GgpipeError as e:
        log.note_end(in_flags(Wording("error: ", e)))
        raise
    say("stopped")
    return 0


def _not_the_head(_: Head) -> int:
    raise AssertionError("the first rank is the head")


def _refuse(error: GgpipeError, _: Head) -> int:
    raise error


def _chat(options: Options) -> ChatSettings:
    chat = ChatSettings(single_turn=True, **options.fields(ChatSettings))
    chat.check_template()
    return chat

"""Models that a command line names by their repository on the Hugging Face Hub: downloaded before the command runs."""

from __future__ import annotations

import contextlib
import shlex
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ggpipe.cli.messages import show, warn
from ggpipe.display.live.terminal import open_terminal
from ggpipe.display.progress import FileProgress
from ggpipe.errors import SettingError
from ggpipe.launch import environment
from ggpipe.launch.job import slots_of
from ggpipe.options.hub import HubSettings
from ggpipe.options.option import Command, Options
from ggpipe.options.settings import ClusterSettings, DisplaySettings, ModelSettings, RankSettings

if TYPE_CHECKING:
    from ggpipe.llama.hub import Hub


def with_models(command: Command, options: Options) -> Options:
    """The options with files for models on the Hub, which are downloaded unless the cache has them.

    For a command that needs no weights, a header is enough. Raises SettingError for a target that is named twice, and
    the errors of `Hub`.
    """
    hub = options[HubSettings]
    if not hub.is_given:
        return options
    models = options[ModelSettings]
    if hub.repo is not None and models.target is not None:
        raise SettingError("hf_repo", f"{hub.repo} names a second target model", "omit it, or omit -m")
    from ggpipe.llama.hub import Hub

    has_user = environment.has_user()
    with _Progress(options) as progress:
        own = Hub(hub.token, hub.offline, warn if has_user else _ignore, progress if has_user else None)
        get = _header if _needs_no_weights(command, options) else _downloaded
        found = [get(own, text, None, True) for text in hub.draft_repos]
        target = get(own, hub.repo, hub.file, False) if hub.repo is not None else None
    new = [paths for paths, is_new in (*found, *([target] if target else [])) if is_new]
    if has_user and not environment.is_rank() and new and not options.is_given("send_weights"):
        tell_others(new, slots_of(options[RankSettings].hostfile))
    values = {"draft.model": [*models.drafts, *(paths[0] for paths, _ in found)]} if found else {}
    return options.with_values({**values, **({"model": target[0][0]} if target else {})})


def tell_others(models: Sequence[Sequence[Path]], hosts: Sequence[str]) -> None:
    """Say how the other machines get models that this one has just downloaded. `models`: the files of each."""
    this = {"localhost", "127.0.0.1", "::1", socket.gethostname(), socket.gethostname().partition(".")[0]}
    others = [host for host in dict.fromkeys(hosts) if host not in this]
    if not others:
        return
    copies = " && ".join(
        f"rsync -L --mkpath {shlex.join(map(str, paths))} $host:{shlex.quote(str(paths[0].parent))}/"
        for paths in models
    )
    names = ", ".join(paths[0].name for paths in models)
    show(
        f"the other machines need {names} at the same path. Unless they share this folder, add --send-weights, or run: "
        f"for host in {shlex.join(others)}; do {copies}; done"
    )


def _needs_no_weights(command: Command, options: Options) -> bool:
    return command.name in ("simulate", "pairs") or (
        command.name == "plan" and options[ClusterSettings].path is not None
    )


def _header(hub: Hub, text: str, file: str | None, is_draft: bool) -> tuple[tuple[Path, ...], bool]:
    from ggpipe.llama.hub_header import header_of  # needs libllama

    return (header_of(hub, hub.find(text, file, is_draft)),), False


def _downloaded(hub: Hub, text: str, file: str | None, is_draft: bool) -> tuple[tuple[Path, ...], bool]:
    """The files of a model, and whether any of them are new."""
    model = hub.find(text, file, is_draft)
    return hub.download(model), not model.is_cached


def _ignore(_: str) -> None:
    pass


class _Progress(contextlib.ExitStack):
    """A bar for each download. Without a terminal, a line now and then."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        self._color = options[DisplaySettings].color
        self._what = ""
        self._bar: Callable[[int, int], None] = lambda done, total: None

    def __call__(self, what: str, done_bytes: int, total_bytes: int) -> None:
        """Show the number of bytes of `what` that are done, and their total."""
        if what != self._what:
            self.close()
            self._what = what
            self._bar = self.enter_context(FileProgress(open_terminal(self._color), what))
        self._bar(done_bytes, total_bytes)

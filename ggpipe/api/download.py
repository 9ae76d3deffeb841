"""`ggpipe.download`: models from the Hugging Face Hub."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from ggpipe.errors import GgpipeError
from ggpipe.options.hub import HubSettings

_NAMES = {"hf_repo": "model", "hf_file": "file", "hf_token": "token"}
_LOG = logging.getLogger("ggpipe")


def download(
    model: str,
    *,
    file: str | None = None,
    draft: bool = False,
    token: str | None = None,
    offline: bool = False,
    progress: Callable[[str, int, int], None] | None = None,
) -> Path:
    """The path of a model on the Hugging Face Hub, which is downloaded into llama.cpp's cache unless it is there.

    engine = ggpipe.Engine(ggpipe.download("user/repo:Q4_K_M"), draft=ggpipe.download("user/small", draft=True))

    `model`: `user/repo`, or `user/repo:quant`. `file`: a file of the repository instead. `draft`: prefer the
    repository's file for drafting, if it has one. `token`: for private models; None: HF_TOKEN, or the one that `hf auth
    login` has saved. `offline`: look only in the cache. `progress`: called with a file's name, how many of its bytes
    are there, and its size in bytes.

    Other machines need the file at the same path. Interrupted downloads continue. Raises SettingError for another
    notation, UsageError if `huggingface_hub` is not installed, ModelError if there is no such model, and RunError if it
    cannot be downloaded.
    """
    from ggpipe.llama.hub import Hub  # needs an extra

    try:
        given = HubSettings(repo=model, file=file, token=token, offline=offline)
        hub = Hub(given.token, given.offline, _LOG.warning, progress)
        return hub.download(hub.find(model, given.file, draft))[0]
    except GgpipeError as e:
        raise e.renamed(_NAMES) from None

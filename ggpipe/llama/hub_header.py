"""The headers of models on the Hugging Face Hub, without their weights: for plans before a download.

A header is kept in the cache folder as a file of the model's size that has a hole in place of the weights.
"""

from __future__ import annotations

from pathlib import Path

from ggpipe.errors import ModelError
from ggpipe.launch.cache_folder import cache_folder, whole_file
from ggpipe.llama.gguf import has_header
from ggpipe.llama.hub import Hub, HubModel
from ggpipe.llama.hub_files import HubFile

_FIRST_BYTES = 1 << 20
_MOST_BYTES = 1 << 28


def header_of(hub: Hub, model: HubModel) -> Path:
    """The first file of a model: its copy in the cache, or one without weights. All parts are next to it.

    Raises ModelError for files that are not GGUF, and RunError if the Hub cannot be reached or a disk is full.
    """
    if model.cached[0] is not None and model.is_cached:
        return model.cached[0]
    folder = cache_folder("headers") / model.repo.replace("/", "--") / model.commit
    paths = [folder / file.path for file in model.files]
    for file, path in zip(model.files, paths, strict=True):
        if not path.exists():
            _write(hub, model, file, path)
    return paths[0]


def _write(hub: Hub, model: HubModel, file: HubFile, path: Path) -> None:
    with whole_file(path) as unfinished:
        n_bytes = min(_FIRST_BYTES, file.n_bytes)
        with unfinished.open("ab") as out:
            while True:
                out.write(hub.fetch(model, file, out.tell(), n_bytes))
                out.flush()
                if unfinished.read_bytes()[:4] != b"GGUF":
                    raise ModelError(f"{file.path} of {model.repo} is not a GGUF file")
                if has_header(unfinished):
                    break
                n_bytes = min(3 * out.tell(), file.n_bytes - out.tell())
                if n_bytes <= 0 or out.tell() > _MOST_BYTES:
                    raise ModelError(f"{file.path} of {model.repo} has no GGUF header that libllama can read")
            out.truncate(file.n_bytes)

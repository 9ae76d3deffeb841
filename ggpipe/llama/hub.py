"""Models on the Hugging Face Hub: downloads, and the cache.

The cache is llama.cpp's (common/hf-cache.cpp), so both use the same copies. `huggingface_hub` speaks to the Hub
and lays out the cache. It starts interrupted downloads from the beginning, so the unfinished file is ours:
`BLOB.incomplete`, to which a later call appends.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ggpipe.errors import ModelError, RunError, Setting, UsageError
from ggpipe.llama.hub_files import HubFile, choose

Progress = Callable[[str, int, int], None]
"""Gets what is done, the number of bytes done, and their total."""

_HASH = re.compile("[0-9a-f]{40}|[0-9a-f]{64}")
_BLOCK_BYTES = 1 << 22
_LARGEST_PLAIN_BYTES = 50 * 10**9
"""Larger files need the Hub's own protocol, which `huggingface_hub` speaks."""


@dataclass(frozen=True, kw_only=True)
class HubModel:
    """A model of a repository: all parts of it, in order."""

    repo: str
    commit: str
    files: tuple[HubFile, ...]
    cached: tuple[Path | None, ...]
    """The copy of each file in the cache, or None."""

    @property
    def is_cached(self) -> bool:
        """Whether the cache has all of it."""
        return None not in self.cached


class Hub:
    """The Hub, and the cache."""

    def __init__(
        self, token: str | None, is_offline: bool, warn: Callable[[str], None], progress: Progress | None = None
    ) -> None:
        """Raises UsageError if `huggingface_hub` is not installed."""
        try:
            import huggingface_hub
        except ModuleNotFoundError as e:
            raise UsageError("models on the Hugging Face Hub need the package: run pip install 'ggpipe[hub]'") from e
        self._hub = huggingface_hub
        huggingface_hub.logging.set_verbosity_error()
        self._token = token
        self._is_offline = is_offline or huggingface_hub.is_offline_mode()
        self._warn = warn
        self._progress = progress or (lambda what, done, total: None)
        endpoint = os.environ.get("MODEL_ENDPOINT") or os.environ.get("HF_ENDPOINT") or None
        self.endpoint = endpoint.rstrip("/") if endpoint else None
        self.cache = Path(os.environ.get("LLAMA_CACHE") or huggingface_hub.constants.HF_HUB_CACHE)

    def find(self, text: str, file: str | None = None, is_draft: bool = False) -> HubModel:
        """The model that `user/repo[:quant]` or `file` names. If the Hub cannot be reached, the one in the cache.

        Raises ModelError if there is no such model, and RunError if it is not in the cache and the Hub cannot be asked.
        """
        repo, _, quant = text.partition(":")
        if not self._is_offline:
            try:
                with self._errors(repo):
                    info = self._api.model_info(repo, files_metadata=True, timeout=10)
            except RunError as e:
                found = self._in_cache(repo, quant, file, is_draft)
                if found is None:
                    raise
                self._warn(f"{e}; using the copy in the cache")
                return found
            files = [
                HubFile(path=own.rfilename, n_bytes=own.size or 0, sha256=own.lfs.sha256 if own.lfs else "")
                for own in info.siblings or ()
                if not {"", ".."} & set(own.rfilename.split("/"))
            ]
            if not _HASH.fullmatch(str(info.sha)) or any(
                own.sha256 and not _HASH.fullmatch(own.sha256) for own in files
            ):
                raise RunError(f"{self._name} describes {repo} with something else than hashes")
            return self._model(repo, str(info.sha), choose(repo, files, quant, file, is_draft))
        found = self._in_cache(repo, quant, file, is_draft)
        if found is None:
            raise ModelError(
                f"{text} is not in {self.cache}: download it once without ", Setting("offline"), " and HF_HUB_OFFLINE"
            )
        return found

    def download(self, model: HubModel) -> tuple[Path, ...]:
        """The model's files in the cache, downloaded and checked if they are missing.

        An interrupted download continues where it stopped. Raises RunError and ModelError.
        """
        left = [file for file, path in zip(model.files, model.cached, strict=True) if path is None]
        self._check_room(model.repo, sum(file.n_bytes - self._n_present(model.repo, file) for file in left))
        paths = []
        for file, path in zip(model.files, model.cached, strict=True):
            if path is None:
                with self._errors(model.repo):
                    path = self._downloaded(model, file)
            paths.append(path)
        return tuple(paths)

    def fetch(self, model: HubModel, file: HubFile, first: int, n_bytes: int) -> bytes:
        """A range of a file's bytes. Raises RunError and ModelError."""
        from huggingface_hub.utils import build_hf_headers

        headers = {**build_hf_headers(token=self._token), "Range": f"bytes={first}-{first + n_bytes - 1}"}
        session = self._hub.get_session()
        with self._errors(model.repo), session.stream("GET", self._url(model, file), headers=headers) as reply:
            self._hub.hf_raise_for_status(reply)
            if reply.status_code != 206:
                raise RunError(
                    f"{self._name} does not send parts of {file.path}: download the model to read its header"
                )
            data: bytes = reply.read()
            return data

    @property
    def _api(self) -> Any:
        return self._hub.HfApi(endpoint=self.endpoint, token=self._token)

    @property
    def _name(self) -> str:
        return self.endpoint or "the Hugging Face Hub"

    def _url(self, model: HubModel, file: HubFile) -> str:
        url: str = self._hub.hf_hub_url(model.repo, file.path, revision=model.commit, endpoint=self.endpoint)
        return url

    # The cache

    def _folder(self, repo: str) -> Path:
        return self.cache / f"models--{repo.replace('/', '--')}"

    def _model(self, repo: str, commit: str, files: Sequence[HubFile]) -> HubModel:
        paths = [self._folder(repo) / "snapshots" / commit / file.path for file in files]
        cached = tuple(path if path.exists() else None for path in paths)
        return HubModel(repo=repo, commit=commit, files=tuple(files), cached=cached)

    def _in_cache(self, repo: str, quant: str, file: str | None, is_draft: bool) -> HubModel | None:
        """A model whose parts are all in the cache, or None."""
        folder = self._folder(repo)
        try:
            commit = (folder / "refs" / "main").read_text().strip()
        except OSError:
            return None
        snapshot = folder / "snapshots" / commit
        files = [
            HubFile(path=str(path.relative_to(snapshot)), n_bytes=path.stat().st_size, sha256="")
            for path in sorted(snapshot.rglob("*.gguf"))
            if path.exists()
        ]
        try:
            return self._model(repo, commit, choose(repo, files, quant, file, is_draft))
        except ModelError:
            return None

    def _unfinished(self, repo: str, file: HubFile) -> Path:
        return self._folder(repo) / "blobs" / f"{file.sha256}.incomplete"

    def _n_present(self, repo: str, file: HubFile) -> int:
        try:
            return self._unfinished(repo, file).stat().st_size if file.sha256 else 0
        except OSError:
            return 0

    def _check_room(self, repo: str, n_bytes: int) -> None:
        """Raises UsageError if the cache's disk has no room for this many bytes."""
        folder = next(path for path in (self.cache, *self.cache.absolute().parents) if path.exists())
        free_bytes = shutil.disk_usage(folder).free
        if n_bytes > free_bytes:
            raise UsageError(
                f"{repo} needs {n_bytes / 1e9:.1f} GB more, and {folder} has {free_bytes / 1e9:.1f} GB free: "
                "free some space, or set LLAMA_CACHE to another folder"
            )

    # Downloads

    def _downloaded(self, model: HubModel, file: HubFile) -> Path:
        if file.sha256 and file.n_bytes <= _LARGEST_PLAIN_BYTES:
            self._download_blob(model, file)
        path = self._hub.hf_hub_download(
            model.repo, file.path, cache_dir=self.cache, endpoint=self.endpoint, token=self._token
        )
        return Path(path)

    def _download_blob(self, model: HubModel, file: HubFile) -> None:
        """Download a file's contents, after those that are already there. Other processes wait meanwhile."""
        from huggingface_hub.file_download import http_get
        from huggingface_hub.utils import WeakFileLock, build_hf_headers

        unfinished = self._unfinished(model.repo, file)
        blob = unfinished.with_suffix("")
        blob.parent.mkdir(parents=True, exist_ok=True)
        with WeakFileLock(unfinished.with_suffix(".lock")):
            if blob.exists():
                return
            n_present = self._n_present(model.repo, file)
            if n_present > file.n_bytes:
                unfinished.unlink()
                n_present = 0
            name = file.path.rpartition("/")[2]
            with unfinished.open("ab") as out:
                http_get(
                    self._url(model, file),
                    out,
                    resume_size=n_present,
                    headers=build_hf_headers(token=self._token),
                    expected_size=file.n_bytes,
                    tqdm_class=_bar(lambda done: self._progress(f"Downloading {name}", done, file.n_bytes)),
                )
            self._check(unfinished, file, name)
            unfinished.replace(blob)

    def _check(self, path: Path, file: HubFile, name: str) -> None:
        """Raises RunError, and removes the file, if its contents are not those of the repository."""
        digest, done = hashlib.sha256(), 0
        with path.open("rb") as own:
            while block := own.read(_BLOCK_BYTES):
                digest.update(block)
                done += len(block)
                self._progress(f"Checking {name}", done, file.n_bytes)
        if digest.hexdigest() != file.sha256:
            path.unlink()
            raise RunError(f"{name} was damaged on its way (its SHA-256 is wrong): run the same command again")

    @contextlib.contextmanager
    def _errors(self, repo: str) -> Iterator[None]:
        """Turns the library's errors into ours, of one line."""
        from huggingface_hub import errors
        from huggingface_hub.utils import httpx

        login = "set HF_TOKEN, or log in with `hf auth login`"
        try:
            yield
        except errors.GatedRepoError as e:
            raise ModelError(
                f"{repo} asks its users to agree to terms: open its page on {self._name}, and {login}"
            ) from e
        except errors.RepositoryNotFoundError as e:
            raise ModelError(f"{self._name} has no repository {repo}: check its name; if it is private, {login}") from e
        except errors.HFValidationError as e:
            raise ModelError(f"{repo} is not the name of a repository: write user/repo or user/repo:quant") from e
        except errors.HfHubHTTPError as e:
            status = e.response.status_code
            if status in (401, 403):
                raise ModelError(f"{self._name} refuses access to {repo}: {login}") from e
            raise RunError(f"{self._name} cannot serve {repo} (status {status})") from e
        except (httpx.HTTPError, errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError) as e:
            why = " ".join(str(e).split()) or type(e).__name__
            raise RunError(f"{self._name} cannot be reached ({why})") from e


def _bar(show: Callable[[int], None]) -> type:
    """A class with the part of tqdm's interface that downloads use. `show` gets the bytes that are there."""

    class Bar:
        def __init__(self, initial: int = 0, **_: object) -> None:
            self._done = initial
            show(initial)

        def update(self, n_bytes: int) -> None:
            self._done += n_bytes
            show(self._done)

        def __enter__(self) -> Bar:
            return self

        def __exit__(self, *_: object) -> None:
            pass

    return Bar

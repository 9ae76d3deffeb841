"""Saving, restoring and erasing the conversations of slots.

Each rank writes the KV cache of its own layers to its own folder. The server's file contains the tokens. It is written
last, and without it the ranks' files are ignored.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec

from ggpipe.core.prefixes import ErasePrefix, PrefixOrder, RestorePrefix, SavePrefix
from ggpipe.errors import GgpipeError, SettingError, UsageError
from ggpipe.launch.cache_folder import whole_file
from ggpipe.server.backend import Backend
from ggpipe.server.errors import ApiError
from ggpipe.server.slots import Slot, Tokens

_LOG = logging.getLogger("ggpipe.server")
_NAME = re.compile(r"\w([\w .+@=,-]*[\w+@=,-])?")
_OF_A_RANK = re.compile(r".*\.rank\d+")
_MOST_NAME_BYTES = 200
_MOST_FILE_BYTES = 64 * 2**20
_KEPT = "slot{}.kept"


class _Saved(msgspec.Struct, frozen=True):
    """The server's file."""

    ggpipe_prefix: int
    """Version of the format."""
    tokens: Tokens
    """The ranks' files contain all but the last."""


_DECODER = msgspec.json.Decoder(_Saved)


def check_folder(folder: Path) -> None:
    """Raises SettingError unless it is a folder that can be written to."""
    if not (folder.is_dir() and os.access(folder, os.R_OK | os.W_OK | os.X_OK)):
        raise SettingError("slot_save_path", f"{folder} does not exist, or is not a folder that can be written to")


class SavedSlots:
    """The saved slots of a server. Used only in the event loop."""

    def __init__(self, backend: Backend, folder: Path | None) -> None:
        self._backend = backend
        self._folder = folder
        self._one_at_a_time = asyncio.Lock()

    async def do(self, action: str, id_slot: str, name: object) -> dict[str, Any]:
        """Answer `POST /slots/{id}?action=...`. Raises ApiError."""
        if self._folder is None:
            raise ApiError(501, "This server does not support slots action. Start it with `--slot-save-path`")
        slots = self._backend.slots.all()
        slot = next((slot for slot in slots if str(slot.id) == id_slot), None)
        if slot is None:
            raise ApiError(
                400, f"`id_slot` must be a number from 0 to {len(slots) - 1}, got {id_slot[:40]!r}", "id_slot"
            )
        match action:
            case "save":
                return await self._save(slot, _checked(name))
            case "restore":
                return await self._restore(slot, _checked(name))
            case "erase":
                return await self._erase(slot)
        raise ApiError(400, "`action` must be save, restore or erase", "action")

    async def keep(self) -> None:
        """Save all slots, for the next start of the server."""
        for slot in self._backend.slots.all():
            if len(slot.tokens) > 1:
                await self._try(self._save(slot, _KEPT.format(slot.id)), f"slot {slot.id} is not saved")

    async def bring_back(self) -> None:
        """Restore the slots that `keep` saved."""
        for slot in self._backend.slots.all():
            name = _KEPT.format(slot.id)
            if os.path.exists(self._path(name)) and not slot.tokens:  # False if it is not accessible
                await self._try(self._restore(slot, name), f"slot {slot.id} is not restored")

    @staticmethod
    async def _try(work: Awaitable[dict[str, Any]], otherwise: str) -> None:
        try:
            found = await work
            _LOG.info("%s", ", ".join(f"{name} {value}" for name, value in found.items() if name != "timings"))
        except ApiError as e:
            _LOG.warning("%s: %s", otherwise, e.message)

    async def _save(self, slot: Slot, name: str) -> dict[str, Any]:
        began, tokens = time.monotonic(), slot.tokens[: self._backend.n_ctx - 1]  # leaves room for one more token
        if len(tokens) < 2:
            raise ApiError(400, f"slot {slot.id} is empty", "id_slot")
        async with self._one_at_a_time:
            n_bytes = await self._order(lambda id: SavePrefix(id, tokens[:-1], name), f"save {name}", 500)
            own = msgspec.json.encode(_Saved(1, tokens))
            try:
                await asyncio.to_thread(_write, self._path(name), own)
            except OSError as e:
                raise ApiError(500, f"cannot save {name}: {e.strerror or e}") from e
        return {
            "id_slot": slot.id, "filename": name, "n_saved": len(tokens) - 1, "n_written": n_bytes + len(own),
            "timings": {"save_ms": _ms_since(began)},
        }  # fmt: skip

    async def _restore(self, slot: Slot, name: str) -> dict[str, Any]:
        began = time.monotonic()
        _check_idle(slot)
        async with self._one_at_a_time:
            tokens, n_bytes = await asyncio.to_thread(_read, self._path(name))
            n_bytes += await self._order(lambda id: RestorePrefix(id, tokens[:-1], name), f"restore {name}", 400)
        _check_idle(slot)
        self._backend.slots.restored(slot, tokens)
        return {
            "id_slot": slot.id, "filename": name, "n_restored": len(tokens) - 1, "n_read": n_bytes,
            "timings": {"restore_ms": _ms_since(began)},
        }  # fmt: skip

    async def _erase(self, slot: Slot) -> dict[str, Any]:
        _check_idle(slot)
        tokens, slot.use = slot.tokens, None
        if tokens:
            await self._order(lambda id: ErasePrefix(id, tokens), "erase", 500)
        return {"id_slot": slot.id, "n_erased": len(tokens)}

    async def _order(self, make: Callable[[int], PrefixOrder], what: str, status: int) -> int:
        """Total size of the ranks' files in bytes. Raises ApiError, with this status if the ranks fail."""
        try:
            return await self._backend.order(make)
        except UsageError as e:
            raise ApiError.of(e) from e
        except GgpipeError as e:
            raise ApiError(status, f"cannot {what}: {e}") from e

    def _path(self, name: str) -> Path:
        assert self._folder is not None
        return self._folder / name


def _checked(name: object) -> str:
    """A file name that cannot leave the folder or name a rank's file. Raises ApiError."""
    is_name = isinstance(name, str) and _NAME.fullmatch(name) and ".." not in name and not _OF_A_RANK.fullmatch(name)
    if not isinstance(name, str) or not is_name or len(name.encode()) > _MOST_NAME_BYTES:
        raise ApiError(
            400, "`filename` must consist of letters, digits, spaces and .+@=,-_, without a folder", "filename"
        )
    return name


def _check_idle(slot: Slot) -> None:
    if slot.is_processing:
        raise ApiError(503, f"slot {slot.id} is in use: try again when its request has ended")


def _write(path: Path, data: bytes) -> None:
    with whole_file(path) as unfinished:
        unfinished.write_bytes(data)


def _read(path: Path) -> tuple[Tokens, int]:
    """The tokens of a file, and its size in bytes. Raises ApiError."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            data = file.read(_MOST_FILE_BYTES)
        saved = _DECODER.decode(data)
    except FileNotFoundError:
        raise ApiError(400, f"{path.name} does not exist", "filename") from None
    except OSError as e:
        raise ApiError(400, f"cannot read {path.name}: {e.strerror or e}", "filename") from e
    except (msgspec.MsgspecError, ValueError) as e:
        raise ApiError(400, f"{path.name} is not a saved slot of this version", "filename") from e
    if saved.ggpipe_prefix != 1 or len(saved.tokens) < 2:
        raise ApiError(400, f"{path.name} is not a saved slot of this version", "filename")
    return saved.tokens, len(data)


def _ms_since(began: float) -> float:
    return 1e3 * (time.monotonic() - began)

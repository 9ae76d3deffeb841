"""Prefixes on disk: what front ends have the ranks do with them, and what comes of it.

An order travels whole from its front end to the head's scheduler, and `PrefixDone` all the way back.
"""

from __future__ import annotations

import msgspec


class _PrefixMessage(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Base of all that front end and head send each other about prefixes; the class name travels as the tag."""


class SavePrefix(_PrefixMessage, frozen=True):
    """Write a prefix to disk. What the prefix cache does not have of it is computed first."""

    id: int
    """Number of the order among the front end's requests and orders."""
    tokens: tuple[int, ...]
    file: str
    """Name in the folder of saved prefixes; each rank has its own part."""


class RestorePrefix(_PrefixMessage, frozen=True):
    """Put a prefix from disk into the prefix cache."""

    id: int
    tokens: tuple[int, ...]
    """Tokens that the file must contain."""
    file: str


class ErasePrefix(_PrefixMessage, frozen=True):
    """Take out of the prefix cache what these tokens begin with. Files stay."""

    id: int
    tokens: tuple[int, ...]


PrefixOrder = SavePrefix | RestorePrefix | ErasePrefix


class PrefixDone(_PrefixMessage, frozen=True):
    """An order is carried out, as far as `problems` allow, or it was cancelled."""

    request: int
    """Id of the order."""
    n_bytes: int = 0
    """Size of all ranks' files."""
    problems: tuple[str, ...] = ()
    """Why ranks could not write or read their parts, a line each."""

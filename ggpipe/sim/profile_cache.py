"""Profiles that are kept, so that the same ranks need not be measured each time."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ggpipe.errors import UsageError
from ggpipe.sim.profile import Profile, as_text, read

_MOST_AGE_S = 30 * 24 * 3600


def folder() -> Path:
    """Where they are: in the user's cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ggpipe" / "profiles"


def key_of(ranks: Sequence[Mapping[str, Any]]) -> str:
    """A name for ranks of which this is known; values are of JSON's types."""
    return hashlib.sha256(json.dumps(list(ranks), sort_keys=True).encode()).hexdigest()[:32]


def find(key: str, n_ranks: int, draft: str | None = None) -> Profile | None:
    """What was kept under this name. Files that are damaged, of another ggpipe's format, or old, count for nothing, as
    does a profile with another draft than that of the fingerprint `draft`; None: with any."""
    path = folder() / f"{key}.json"
    try:
        if time.time() - path.stat().st_mtime > _MOST_AGE_S:
            return None
        profile = read(path)
    except (OSError, UsageError):
        return None
    has_draft = profile.draft is not None and profile.draft.fingerprint == draft
    return profile if len(profile.ranks) == n_ranks and (has_draft or draft is None) else None


def keep(key: str, profile: Profile) -> None:
    """Keep it, where the cache can be written to."""
    path = folder() / f"{key}.json"
    made = path.with_suffix(f".{os.getpid()}")
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        made.write_text(as_text(profile))
        made.replace(path)  # whole or not at all

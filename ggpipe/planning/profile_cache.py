"""A cache of profiles, so that the same ranks are measured only once."""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ggpipe.cluster.profile import Profile, as_text, read
from ggpipe.errors import UsageError
from ggpipe.launch.cache_folder import cache_folder, whole_file

_KIND = "profiles"
_MOST_AGE_S = 30 * 24 * 3600


def key_of(ranks: Sequence[Mapping[str, Any]]) -> str:
    """The cache key of a profile. `ranks`: properties of each rank, as JSON values."""
    return hashlib.sha256(json.dumps(list(ranks), sort_keys=True).encode()).hexdigest()[:32]


def find(key: str, n_ranks: int, drafts: Sequence[str] = ()) -> Profile | None:
    """The cached profile of `n_ranks` ranks; None if there is none.

    `drafts`: fingerprints of the drafts that it must include; it may have others. Files that are damaged, old, or in
    another format are ignored.
    """
    try:
        path = cache_folder(_KIND) / f"{key}.json"
        if time.time() - path.stat().st_mtime > _MOST_AGE_S:
            return None
        profile = read(path)
    except (OSError, UsageError):
        return None
    has_drafts = {draft.fingerprint for draft in profile.drafts} >= set(drafts)
    return profile if len(profile.ranks) == n_ranks and has_drafts else None


def keep(key: str, profile: Profile) -> None:
    """Cache a profile. Does nothing if the cache cannot be written."""
    with contextlib.suppress(OSError, UsageError), whole_file(cache_folder(_KIND) / f"{key}.json") as path:
        path.write_text(as_text(profile))

"""Checks that models' draft tokens are taken back without a trace: `python -m support.state_check FOLDER NAME...`.

NAME: an architecture of `support.architectures`, whose model is written into FOLDER.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ggpipe.config.context import ContextConfig
from ggpipe.core.messages import KvKind, KvOp
from ggpipe.errors import IndivisibleModelError
from ggpipe.llama.sequence_memory import COMPRESSED
from support.architectures import SMALL, write
from support.pipeline import Pipeline
from support.reference import Logits, run_of

_NONE: tuple[KvOp, ...] = ()
_N_PROMPT, _N_ALL = 110, 140  # also across the 128th token, where DeepSeek-V4 has collected enough for a cell
_TOKENS = tuple((5 + 37 * i + i * i) % 110 + 3 for i in range(_N_ALL))


def _rows(
    path: Path, cuts: tuple[int, ...], exact: bool, most: int, drafts: bool, shares: Sequence[Sequence[float]] = ()
) -> Logits:
    """Logits behind the prompt, in runs of 1 to `most` rows. `drafts`: before each, draft tokens in one run or two are
    taken back."""
    ids, at, n, found = iter(range(1, 1000)), _N_PROMPT, 0, []
    with Pipeline(path, cuts, ContextConfig(n_ctx=256, n_seq=3, exact=exact), shares=shares) as pipeline:
        pipeline.decode(run_of(next(ids), _TOKENS[:at], 0))
        while at < _N_ALL:
            n, ops = n % most + 1, _NONE
            if drafts:
                pipeline.decode(run_of(next(ids), [_TOKENS[at], 9, 7], at, ops=(KvOp(KvKind.CP, 0, 1, 0, 0),)))
                later = _NONE
                if n % 2:
                    pipeline.decode(run_of(next(ids), [4, 6], at + 3, ops=(KvOp(KvKind.CP, 0, 2, 0, 0),)))
                    later = (KvOp(KvKind.RM, 2),)
                ops = (*later, KvOp(KvKind.CP, 1, 0, 0, 0), KvOp(KvKind.RM, 0, p0=at), KvOp(KvKind.RM, 1))
            found.append(pipeline.decode(run_of(next(ids), _TOKENS[at : at + n], at, ops=ops)))
            at += n
    return np.concatenate(found)[: _N_ALL - _N_PROMPT]


def _check(path: Path, cuts: tuple[int, ...]) -> None:
    for exact in (True, False):
        plain = _rows(path, cuts, exact, 4, drafts=False)
        np.testing.assert_array_equal(_rows(path, cuts, exact, 4, drafts=True), plain)
        single = _rows(path, cuts, exact, 1, drafts=False)
        np.testing.assert_allclose(plain, single, rtol=0, atol=0 if exact else 0.01 * single.std())


def _check_groups(path: Path) -> None:
    """Of two ranks each, in two stages."""
    plain, taken_back = (_rows(path, (2,), False, 4, drafts, [(1, 1), (1, 1)]) for drafts in (False, True))
    np.testing.assert_array_equal(taken_back, plain)


def check_all(name: str, folder: Path) -> None:
    """One rank, and two where the model can be divided."""
    path = write(name, folder / f"{name}.gguf", sizes=SMALL)
    _check(path, ())
    try:
        with Pipeline(path, (1,)):
            pass
    except IndivisibleModelError:
        return
    _check(path, (1,))
    if name in COMPRESSED:
        _check_groups(path)


if __name__ == "__main__":
    for name in sys.argv[2:]:
        print(name, file=sys.stderr)
        check_all(name, Path(sys.argv[1]))

"""Checks that models' draft tokens are taken back without a trace: `python -m support.state_check FOLDER NAME...`.

NAME: an architecture of `support.architectures`, whose model is written into FOLDER.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from ggpipe.config.context import ContextConfig
from ggpipe.core.messages import KvKind, KvOp
from ggpipe.errors import IndivisibleModelError
from support.architectures import SMALL, write
from support.pipeline import Pipeline
from support.reference import Logits, run_of

_NONE: tuple[KvOp, ...] = ()
_N_PROMPT, _N_ALL = 20, 50
_TOKENS = tuple((5 + 37 * i + i * i) % 110 + 3 for i in range(_N_ALL))


def _rows(path: Path, cuts: tuple[int, ...], exact: bool, most: int, drafts: bool) -> Logits:
    """Logits behind the prompt, in runs of 1 to `most` rows. `drafts`: before each, draft tokens in one run or two are
    taken back."""
    ids, at, n, found = iter(range(1, 1000)), _N_PROMPT, 0, []
    with Pipeline(path, cuts, ContextConfig(n_ctx=256, n_seq=3, exact=exact)) as pipeline:
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


if __name__ == "__main__":
    for name in sys.argv[2:]:
        print(name, file=sys.stderr)
        check_all(name, Path(sys.argv[1]))

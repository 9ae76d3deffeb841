"""Runs that branch, roll back and mix sequences."""

from ggpipe.core.messages import KvKind, KvOp, LogitsKind, LogitsRequest, Row, Run
from support.reference import run_of

FULL = (LogitsRequest(LogitsKind.FULL),)
RM, CP = KvKind.RM, KvKind.CP


def rows_of(*rows: tuple[int, int, tuple[int, ...]]) -> tuple[Row, ...]:
    """(token, position, sequence ids) each; everything is wanted."""
    return tuple(Row(token=token, pos=pos, seqs=seqs, request=0, logits_request=0) for token, pos, seqs in rows)


# An ancestor in a run carries its descendants' ids, so that their next positions are free.
TREE = (
    run_of(1, range(40, 60), 0),
    # two branches below position 19, in one run
    Run(
        id=2,
        rows=rows_of((7, 20, (0,)), (8, 20, (1,)), (9, 21, (0,)), (10, 21, (1,))),
        ops=(KvOp(CP, 0, 1, 0, 20),),
        logits_requests=FULL,
    ),
    # the second branch wins and splits again below a token that is in the same run
    Run(
        id=3,
        rows=rows_of((11, 22, (1, 2, 3)), (12, 23, (1,)), (13, 23, (2,)), (14, 23, (3,)), (15, 24, (3,))),
        ops=(KvOp(RM, 0), KvOp(CP, 1, 2, 0, 22), KvOp(CP, 1, 3, 0, 22)),
        logits_requests=FULL,
    ),
    # sequence 3 wins; its last token is taken back, and sequence 0 starts anew from its prefix
    Run(
        id=4,
        rows=rows_of((16, 24, (3,))),
        ops=(KvOp(RM, 1), KvOp(RM, 2), KvOp(RM, 3, -1, 24, -1)),
        logits_requests=FULL,
    ),
    Run(
        id=5,
        rows=rows_of((17, 5, (0,)), (18, 25, (3,)), (19, 6, (0,))),
        ops=(KvOp(CP, 3, 0, 0, 5),),
        logits_requests=FULL,
    ),
    Run(id=6, rows=rows_of((20, 0, (2,)), (21, 1, (2,))), ops=(KvOp(RM, 3),), logits_requests=FULL),
    Run(id=7, rows=(), ops=(KvOp(RM, 0),)),
    run_of(8, range(60, 70), 2, (2,)),
)

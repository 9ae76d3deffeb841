"""Runs and results as bytes. Little-endian; every message starts with the format's version.

A run's header sits in front of its activations in one buffer, so a hop is one message. Each stage appends its Span;
since all fields have fixed sizes, a header with a placeholder is as long as the final one, and the stage writes its
activations behind it while it computes.
"""

from __future__ import annotations

import json
import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ggpipe.core.messages import KvKind, KvOp, Row, RowLogits, Run, RunResult, Span, Want, WantKind
from ggpipe.errors import RunError
from ggpipe.transport.base import Payload

VERSION = 1
# version, flags, spans, wants, run, epoch, rows, operations, sequence ids of all rows, banned ids of all wants,
# bytes of a row mask (for rows that died in flight; 0 so far)
_RUN = struct.Struct("<BBBBqiIIIII")
_OP = struct.Struct("<Biiii")
_WANT = struct.Struct("<BII")
_SPAN = struct.Struct("<iddq")
# version, flags, spans, unused, run, rows
_RESULT = struct.Struct("<BBBBqI")
# row, kind, count, log-sum-exp
_ROW = struct.Struct("<iiId")
_CANCELLED = 1


def run_header(run: Run, spans: tuple[Span, ...]) -> bytes:
    """The run's header, padded to 8 bytes."""
    seqs = [s for row in run.rows for s in row.seqs]
    banned = [t for want in run.wants for t in want.banned]
    parts = [
        _RUN.pack(VERSION, _CANCELLED if run.cancelled else 0, len(spans), len(run.wants), run.id, run.epoch,
                  len(run.rows), len(run.ops), len(seqs), len(banned), 0),
        *(_SPAN.pack(s.rank, s.compute_s, s.busy_s, s.sent_bytes) for s in spans),
        *(_OP.pack(op.kind, op.seq, op.dst, op.p0, op.p1) for op in run.ops),
        *(_WANT.pack(want.kind, want.n, len(want.banned)) for want in run.wants),
        np.array(banned, "<i4").tobytes(),
        np.array([(row.token, row.pos, row.request, row.want, len(row.seqs)) for row in run.rows], "<i4").tobytes(),
        np.array(seqs, "<i4").tobytes(),
    ]  # fmt: skip
    header = b"".join(parts)
    return header + bytes(-len(header) % 8)


def read_run(payload: Payload) -> tuple[Run, tuple[Span, ...], int]:
    """A run, the spans so far, and where the activations start."""
    view = payload.data
    _check_version(view)
    _, flags, n_spans, n_wants, run_id, epoch, n_rows, n_ops, n_seqs, n_banned, n_mask = _RUN.unpack_from(view)
    at = _RUN.size
    spans, at = _read_spans(view, at, n_spans)
    ops = tuple(KvOp(KvKind(kind), *rest) for kind, *rest in _OP.iter_unpack(view[at : at + n_ops * _OP.size]))
    at += n_ops * _OP.size
    heads = list(_WANT.iter_unpack(view[at : at + n_wants * _WANT.size]))
    at += n_wants * _WANT.size
    banned = np.frombuffer(view, "<i4", n_banned, at).tolist()
    at += 4 * n_banned
    wants = []
    for kind, n, count in heads:
        wants.append(Want(WantKind(kind), n, tuple(banned[:count])))
        banned = banned[count:]
    table = np.frombuffer(view, "<i4", 5 * n_rows, at).reshape(n_rows, 5).tolist()
    at += 20 * n_rows
    seqs = np.frombuffer(view, "<i4", n_seqs, at).tolist()
    at += 4 * n_seqs + n_mask
    rows, used = [], 0
    for token, pos, request, want, n in table:
        rows.append(Row(token, pos, tuple(seqs[used : used + n]), request, want))
        used += n
    run = Run(run_id, epoch, tuple(rows), ops, tuple(wants), bool(flags & _CANCELLED))
    return run, spans, at + -at % 8


def result_message(result: RunResult) -> Payload:
    """A result as one message."""
    parts = [
        _RESULT.pack(
            VERSION, _CANCELLED if result.cancelled else 0, len(result.spans), 0, result.run, len(result.rows)
        ),
        *(_SPAN.pack(s.rank, s.compute_s, s.busy_s, s.sent_bytes) for s in result.spans),
    ]
    for row in result.rows:
        logits = np.asarray(row.logits, "<f4")
        kind = WantKind.FULL if row.ids is None else WantKind.TOP
        parts.append(_ROW.pack(row.row, kind, len(logits), row.log_sum_exp))
        if row.ids is not None:
            parts.append(np.array(row.ids, "<i4").tobytes())
        parts.append(logits.tobytes())
    return as_payload(b"".join(parts))


def read_result(payload: Payload) -> RunResult:
    """The inverse of `result_message`."""
    view = payload.data
    _check_version(view)
    _, flags, n_spans, _, run, n_rows = _RESULT.unpack_from(view)
    spans, at = _read_spans(view, _RESULT.size, n_spans)
    rows = []
    for _ in range(n_rows):
        row, kind, n, log_sum_exp = _ROW.unpack_from(view, at)
        at += _ROW.size
        ids = None
        if kind == WantKind.TOP:
            ids = tuple(np.frombuffer(view, "<i4", n, at).tolist())
            at += 4 * n
        logits: NDArray[np.float32] = np.frombuffer(view, "<f4", n, at)
        at += 4 * n
        rows.append(RowLogits(row, ids, logits if ids is None else tuple(logits.tolist()), log_sum_exp))
    return RunResult(run, tuple(rows), spans, bool(flags & _CANCELLED))


def ids_message(ids: tuple[int, ...]) -> Payload:
    """Run ids to cancel, as one message."""
    return as_payload(np.array(ids, "<i8").tobytes())


def read_ids(payload: Payload) -> tuple[int, ...]:
    """The inverse of `ids_message`."""
    return tuple(np.frombuffer(payload, "<i8").tolist())


def control_message(kind: str, **fields: Any) -> Payload:
    """A control message: JSON with its kind under "kind"."""
    return as_payload(json.dumps({"kind": kind, **fields}).encode())


def read_control(payload: Payload) -> dict[str, Any]:
    """The inverse of `control_message`."""
    content: dict[str, Any] = json.loads(bytes(payload))
    return content


def as_payload(data: bytes) -> Payload:
    """Bytes as a transport takes them."""
    return np.frombuffer(data, np.uint8)


def _read_spans(view: memoryview, at: int, n: int) -> tuple[tuple[Span, ...], int]:
    end = at + n * _SPAN.size
    return tuple(Span(*fields) for fields in _SPAN.iter_unpack(view[at:end])), end


def _check_version(view: memoryview) -> None:
    if view[0] != VERSION:
        raise RunError(f"a message of format {view[0]} arrived, this rank speaks {VERSION}: use one ggpipe everywhere")

"""Runs, results and guesses as bytes. Little-endian; all start with the format's version.

A run's header sits in front of its activations in one buffer, so a hop is one message. Each stage appends its Span to
the header's end and hands the rest on as it came. All fields have fixed sizes, so the stage knows the header's length
before it computes, and the activations are written behind it at once.

Numbers are packed by `struct` and `memoryview.cast`: a hop's few values cost less so than through numpy, above all when
the decode before has pushed Python out of the CPU's caches.
"""

from __future__ import annotations

import itertools
import json
import struct
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from ggpipe.config import SpeculationConfig
from ggpipe.core.messages import (
    Accepted,
    Begin,
    Done,
    Expansion,
    KvKind,
    KvOp,
    MicroBatch,
    Row,
    RowLogits,
    Run,
    RunRecord,
    RunResult,
    Span,
    Steering,
    Want,
    WantKind,
)
from ggpipe.errors import RunError
from ggpipe.transport.base import Payload

VERSION = 2
# version, flags, spans, wants, run, epoch, rows, operations, sequence ids of all rows, banned ids of all wants,
# bytes of a row mask (for rows that died in flight; 0 so far)
_RUN = struct.Struct("<BBBBqiIIIII")
_OP = struct.Struct("<Biiii")
_WANT = struct.Struct("<BII")
_SPAN = struct.Struct("<idddq")
# version, flags, spans, unused, run, rows
_RESULT = struct.Struct("<BBBBqI")
# row, kind, count, log-sum-exp
_ROW = struct.Struct("<iiId")
# version, kind, request, epoch, lead, tokens
_STEER = struct.Struct("<BBqqiI")
_BEGIN, _ACCEPTED, _DONE = 1, 2, 3
# version, complete, request, epoch, expansions, runs
_GUESS = struct.Struct("<BBqqII")
_EXPANSION = struct.Struct("<iiII")
_CANDIDATE = struct.Struct("<id")
# run, rows, guesses, cancelled, spans
_RECORD = struct.Struct("<qIIBB")
_CANCELLED = 1
_FLAGS_AT, _SPANS_AT = 1, 2


def run_header(run: Run) -> bytes:
    """The run's header without spans."""
    seqs = [s for row in run.rows for s in row.seqs]
    banned = [t for want in run.wants for t in want.banned]
    table = [x for row in run.rows for x in (row.token, row.pos, row.request, row.want, len(row.seqs))]
    flags = _CANCELLED if run.cancelled else 0
    return b"".join((
        _RUN.pack(VERSION, flags, 0, len(run.wants), run.id, run.epoch, len(run.rows), len(run.ops), len(seqs),
                  len(banned), 0),
        *(_OP.pack(op.kind, op.seq, op.dst, op.p0, op.p1) for op in run.ops),
        *(_WANT.pack(want.kind, want.n, len(want.banned)) for want in run.wants),
        _ints(banned), _ints(table), _ints(seqs),
    ))  # fmt: skip


def header_with(header: bytes, spans: tuple[Span, ...], cancelled: bool) -> bytes:
    """A header as `run_header` made it, with spans, padded to 8 bytes; its length does not depend on their values."""
    parts = [header, _spans(spans)]
    padding = -sum(map(len, parts)) % 8
    full = bytearray().join((*parts, bytes(padding)))
    full[_FLAGS_AT] = _CANCELLED if cancelled else 0
    full[_SPANS_AT] = len(spans)
    return bytes(full)


def read_run(payload: Payload) -> tuple[Run, bytes, tuple[Span, ...], int]:
    """A run, its header without spans, the spans, and where the activations start."""
    view = memoryview(payload)
    _check_version(view)
    _, flags, n_spans, n_wants, run_id, epoch, n_rows, n_ops, n_seqs, n_banned, n_mask = _RUN.unpack_from(view)
    at = _RUN.size
    ops: tuple[KvOp, ...] = ()
    if n_ops:
        ops = tuple(KvOp(KvKind(kind), *rest) for kind, *rest in _OP.iter_unpack(view[at : at + n_ops * _OP.size]))
        at += n_ops * _OP.size
    wants: tuple[Want, ...] = ()
    if n_wants:
        heads = list(_WANT.iter_unpack(view[at : at + n_wants * _WANT.size]))
        at += n_wants * _WANT.size
        banned = _read_ints(view, at, n_banned)
        at += 4 * n_banned
        starts = itertools.accumulate((count for _, _, count in heads), initial=0)
        wants = tuple(
            Want(WantKind(kind), n, tuple(banned[start : start + count]))
            for (kind, n, count), start in zip(heads, starts, strict=False)
        )
    table = _read_ints(view, at, 5 * n_rows)
    at += 20 * n_rows
    seqs = _read_ints(view, at, n_seqs)
    at += 4 * n_seqs + n_mask
    rows, used = [], 0
    for i in range(0, 5 * n_rows, 5):
        token, pos, request, want, n = table[i : i + 5]
        rows.append(Row(token, pos, tuple(seqs[used : used + n]), request, want))
        used += n
    header = bytes(view[:at])
    spans, at = _read_spans(view, at, n_spans)
    return Run(run_id, epoch, tuple(rows), ops, wants, bool(flags & _CANCELLED)), header, spans, at + -at % 8


def result_message(result: RunResult) -> Payload:
    """A result as one message."""
    parts = [
        _RESULT.pack(
            VERSION, _CANCELLED if result.cancelled else 0, len(result.spans), 0, result.run, len(result.rows)
        ),
        _spans(result.spans),
    ]
    for row in result.rows:
        if row.ids is None:
            logits = np.asarray(row.logits, "<f4").tobytes()
            parts += [_ROW.pack(row.row, WantKind.FULL, len(logits) // 4, row.log_sum_exp), logits]
        else:
            n = len(row.ids)
            parts += [_ROW.pack(row.row, WantKind.TOP, n, row.log_sum_exp), _ints(row.ids)]
            parts.append(struct.pack(f"<{n}f", *row.logits))
    return b"".join(parts)


def read_result(payload: Payload) -> RunResult:
    """The inverse of `result_message`."""
    view = memoryview(payload)
    _check_version(view)
    _, flags, n_spans, _, run, n_rows = _RESULT.unpack_from(view)
    spans, at = _read_spans(view, _RESULT.size, n_spans)
    rows = []
    for _ in range(n_rows):
        row, kind, n, log_sum_exp = _ROW.unpack_from(view, at)
        at += _ROW.size
        if kind == WantKind.TOP:
            ids = tuple(_read_ints(view, at, n))
            rows.append(RowLogits(row, ids, struct.unpack_from(f"<{n}f", view, at + 4 * n), log_sum_exp))
            at += 8 * n
        else:
            rows.append(RowLogits(row, None, np.frombuffer(view, "<f4", n, at), log_sum_exp))
            at += 4 * n
    return RunResult(run, tuple(rows), spans, bool(flags & _CANCELLED))


def ids_message(ids: tuple[int, ...]) -> Payload:
    """Run ids to cancel, as one message."""
    return struct.pack(f"<{len(ids)}q", *ids)


def read_ids(payload: Payload) -> tuple[int, ...]:
    """The inverse of `ids_message`."""
    return struct.unpack(f"<{len(payload) // 8}q", payload)


def steering_message(message: Steering) -> Payload:
    """What the draft is told, as one message."""
    match message:
        case Accepted(request, epoch, tokens, lead):
            return _STEER.pack(VERSION, _ACCEPTED, request, epoch, lead, len(tokens)) + _ints(tokens)
        case Done(request):
            return _STEER.pack(VERSION, _DONE, request, 0, 0, 0)
        case Begin():
            rest = asdict(message) | {"prompt": None, "ends": sorted(message.ends)}
            head = _STEER.pack(VERSION, _BEGIN, message.request, 0, 0, len(message.prompt))
            return head + _ints(message.prompt) + json.dumps(rest).encode()


def read_steering(payload: Payload) -> Steering:
    """The inverse of `steering_message`."""
    view = memoryview(payload)
    _check_version(view)
    _, kind, request, epoch, lead, n = _STEER.unpack_from(view)
    tokens = _read_ints(view, _STEER.size, n)
    if kind == _ACCEPTED:
        return Accepted(request, epoch, tokens, lead)
    if kind == _DONE:
        return Done(request)
    rest = json.loads(bytes(view[_STEER.size + 4 * n :]))
    rest |= {
        "prompt": tokens,
        "ends": frozenset(rest["ends"]),
        "banned": tuple(rest["banned"]),
        "speculation": SpeculationConfig(**rest["speculation"]),
    }
    return Begin(**rest)


def guess_message(batch: MicroBatch, records: Sequence[RunRecord]) -> Payload:
    """Guesses as one message; with the draft's runs that ended since the last one, for the head's books."""
    parts = [_GUESS.pack(VERSION, batch.complete, batch.request, batch.epoch, len(batch.expansions), len(records))]
    for expansion in batch.expansions:
        parts.append(_EXPANSION.pack(expansion.parent, expansion.first, expansion.n, len(expansion.candidates)))
        parts += [_CANDIDATE.pack(token, prob) for token, prob in expansion.candidates]
    for record in records:
        head = _RECORD.pack(record.id, record.n_rows, record.n_guesses, record.cancelled, len(record.spans))
        parts += [head, _spans(record.spans)]
    return b"".join(parts)


def read_guesses(payload: Payload) -> tuple[MicroBatch, tuple[RunRecord, ...]]:
    """The inverse of `guess_message`."""
    view = memoryview(payload)
    _check_version(view)
    _, complete, request, epoch, n_expansions, n_records = _GUESS.unpack_from(view)
    at = _GUESS.size
    expansions = []
    for _ in range(n_expansions):
        parent, first, n, n_candidates = _EXPANSION.unpack_from(view, at)
        at += _EXPANSION.size
        end = at + n_candidates * _CANDIDATE.size
        expansions.append(Expansion(parent, first, n, tuple(_CANDIDATE.iter_unpack(view[at:end]))))
        at = end
    records = []
    for _ in range(n_records):
        run, n_rows, n_guesses, cancelled, n_spans = _RECORD.unpack_from(view, at)
        spans, at = _read_spans(view, at + _RECORD.size, n_spans)
        records.append(RunRecord(run, n_rows, n_guesses, bool(cancelled), spans))
    return MicroBatch(request, epoch, tuple(expansions), bool(complete)), tuple(records)


def control_message(kind: str, **fields: Any) -> Payload:
    """A control message: JSON with its kind under "kind"."""
    return json.dumps({"kind": kind, **fields}).encode()


def read_control(payload: Payload) -> dict[str, Any]:
    """The inverse of `control_message`."""
    content: dict[str, Any] = json.loads(bytes(payload))
    return content


def _spans(spans: Sequence[Span]) -> bytes:
    return b"".join(_SPAN.pack(s.rank, s.start_s, s.compute_s, s.busy_s, s.sent_bytes) for s in spans)


def _ints(values: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(values)}i", *values)


def _read_ints(view: memoryview, at: int, n: int) -> tuple[int, ...]:
    return struct.unpack_from(f"<{n}i", view, at)


def _read_spans(view: memoryview, at: int, n: int) -> tuple[tuple[Span, ...], int]:
    end = at + n * _SPAN.size
    return tuple(Span(*fields) for fields in _SPAN.iter_unpack(view[at:end])), end


def _check_version(view: memoryview) -> None:
    if view[0] != VERSION:
        raise RunError(f"a message of format {view[0]} arrived, this rank speaks {VERSION}: use one ggpipe everywhere")

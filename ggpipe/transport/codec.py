"""Runs and results as bytes. Little-endian; all start with the format's version.

A run's header precedes its activations in one buffer, so a hop is one message. Each stage appends its Span to
the header's end and hands the rest on as it came. All fields have fixed sizes, so the stage knows the header's length
before it computes, and the activations are written directly after it.

Numbers are packed by `struct` and `memoryview.cast`: a hop's few values cost less so than through numpy, above all when
the decode before has pushed Python out of the CPU's caches.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from ggpipe.core.events import CancelRuns
from ggpipe.core.messages import (
    KvKind,
    KvOp,
    LogitsKind,
    LogitsRequest,
    Restore,
    Row,
    RowLogits,
    Run,
    RunResult,
    Save,
    Span,
)
from ggpipe.errors import RunError
from ggpipe.transport.base import Payload

VERSION = 18
# version, flags, spans, logits requests, run, first run of kept rows, rows, operations, sequence ids of all rows, ids
# that wants name, numbers of what is to be saved or restored, bytes of the mask of dropped rows, which comes last
_RUN = struct.Struct("<BBHIqqIIIIII")
_MASK_BYTES, _MASK_BYTES_AT = struct.Struct("<I"), _RUN.size - 4
_OP = struct.Struct("<Biiii")
# kind, keeps, sums, n, banned ids, other ids, temperature, min-p, random number
_LOGITS_REQUEST = struct.Struct("<B??IIIddd")
_SPAN = struct.Struct("<idddqI")
# version, flags, spans, run, rows
_RESULT = struct.Struct("<BBHqI")
# row, kind, count, how many of them come last since they are named, whether shares of smaller ids follow, log-sum-exp
_ROW = struct.Struct("<iiII?d")
ROW_OF_RUN = struct.Struct("<qi")
"""A run, and a row in it."""
# version, runs
_CANCEL = struct.Struct("<BI")
# version, run, rows, layers, numbers in a state
_STATES = struct.Struct("<BqIHI")
# version, request, run, row
_FETCH = struct.Struct("<Bqqi")
# version, request, row
_FETCHED = struct.Struct("<Bqi")
# version, run
_PART_SPAN = struct.Struct("<Bq")
_CANCELLED, _PAUSES = 1, 2
_FLAGS_AND_SPANS, _FLAGS_AT = struct.Struct("<BH"), 1  # of a run


def run_header(run: Run) -> bytes:
    """The run's header without spans."""
    seqs = [s for row in run.rows for s in row.seqs]
    named = [t for r in run.logits_requests for t in (*r.banned, *r.also)]
    table = [x for row in run.rows for x in (row.token, row.pos, row.request, row.logits_request, len(row.seqs))]
    save: tuple[int, ...] = ()
    if run.save is not None:
        name = run.save.file.encode()
        restores = isinstance(run.save, Restore)
        save = (run.save.request, run.save.seq, restores, len(name), *name, *run.save.tokens)
    flags = (_CANCELLED if run.cancelled else 0) | (_PAUSES if run.pauses else 0)
    header = b"".join((
        _RUN.pack(VERSION, flags, 0, len(run.logits_requests), run.id, run.kept_from, len(run.rows), len(run.ops),
                  len(seqs), len(named), len(save), 0),
        *(_OP.pack(op.kind, op.seq, op.dst, op.p0, op.p1) for op in run.ops),
        *(
            _LOGITS_REQUEST.pack(r.kind, r.keeps, r.sums, r.n, len(r.banned), len(r.also), r.temp, r.min_p, r.number)
            for r in run.logits_requests
        ),
        pack_ints(named), pack_ints(table), pack_ints(seqs), pack_ints(save),
    ))  # fmt: skip
    return header_without(header, len(run.rows), run.dropped) if run.dropped else header


def header_without(header: bytes, n_rows: int, dropped: Collection[int]) -> bytes:
    """The header without spans of a run of `n_rows` rows, of which these are dropped; its length does not depend on
    which."""
    n_bytes = -(-n_rows // 8)
    (n_before,) = _MASK_BYTES.unpack_from(header, _MASK_BYTES_AT)
    mask = sum(1 << row for row in dropped).to_bytes(n_bytes, "little")
    masked = bytearray().join((header[: len(header) - n_before], mask))
    _MASK_BYTES.pack_into(masked, _MASK_BYTES_AT, n_bytes)
    return bytes(masked)


def header_with(header: bytes, spans: tuple[Span, ...], cancelled: bool) -> bytes:
    """A header as `run_header` made it, with spans, padded to 8 bytes; its length does not depend on their values."""
    parts = [header, pack_spans(spans)]
    padding = -sum(map(len, parts)) % 8
    full = bytearray().join((*parts, bytes(padding)))
    flags = header[_FLAGS_AT] & ~_CANCELLED | (_CANCELLED if cancelled else 0)
    _FLAGS_AND_SPANS.pack_into(full, _FLAGS_AT, flags, len(spans))
    return bytes(full)


def read_run(payload: Payload) -> tuple[Run, bytes, tuple[Span, ...], int]:
    """A run, its header without spans, the spans, and where the activations start."""
    view = memoryview(payload)
    check_version(view)
    _, flags, n_spans, n_logits_requests, run_id, kept_from, n_rows, n_ops, n_seqs, n_named, n_save, n_mask = (
        _RUN.unpack_from(view)
    )
    at = _RUN.size
    ops: tuple[KvOp, ...] = ()
    if n_ops:
        ops = tuple(KvOp(KvKind(kind), *rest) for kind, *rest in _OP.iter_unpack(view[at : at + n_ops * _OP.size]))
        at += n_ops * _OP.size
    logits_requests: list[LogitsRequest] = []
    if n_logits_requests:
        heads = list(_LOGITS_REQUEST.iter_unpack(view[at : at + n_logits_requests * _LOGITS_REQUEST.size]))
        at += n_logits_requests * _LOGITS_REQUEST.size
        named = iter(read_ints(view, at, n_named))
        at += 4 * n_named
        for kind, keeps, sums, n, n_banned, n_also, *numbers in heads:
            banned, also = tuple(itertools.islice(named, n_banned)), tuple(itertools.islice(named, n_also))
            logits_requests.append(LogitsRequest(LogitsKind(kind), n, banned, keeps, sums, also, 1, *numbers))
    table = read_ints(view, at, 5 * n_rows)
    at += 20 * n_rows
    seqs = read_ints(view, at, n_seqs)
    at += 4 * n_seqs
    save: Save | Restore | None = None
    if n_save:
        request, seq, restores, n_name, *numbers = read_ints(view, at, n_save)
        name, tokens = bytes(numbers[:n_name]).decode(), tuple(numbers[n_name:])
        save = Restore(request, seq, tokens, name) if restores else Save(request, seq, tokens, name)
        at += 4 * n_save
    mask = int.from_bytes(view[at : at + n_mask], "little")
    at += n_mask
    rows, used = [], 0
    for i in range(0, 5 * n_rows, 5):
        token, pos, request, logits_request, n = table[i : i + 5]
        rows.append(
            Row(token=token, pos=pos, seqs=tuple(seqs[used : used + n]), request=request, logits_request=logits_request)
        )
        used += n
    header = bytes(view[:at])
    spans, at = read_spans(view, at, n_spans)
    run = Run(
        id=run_id,
        rows=tuple(rows),
        ops=ops,
        logits_requests=tuple(logits_requests),
        cancelled=bool(flags & _CANCELLED),
        save=save,
        kept_from=kept_from,
        dropped=frozenset(row for row in range(n_rows) if mask >> row & 1) if mask else frozenset(),
        pauses=bool(flags & _PAUSES),
    )
    return run, header, spans, at + -at % 8


def result_message(result: RunResult) -> Payload:
    """A result as one message."""
    parts = [
        _RESULT.pack(VERSION, _CANCELLED if result.cancelled else 0, len(result.spans), result.run, len(result.rows)),
        pack_spans(result.spans),
    ]
    for row in result.rows:
        if row.ids is None:
            logits = np.asarray(row.logits, "<f4").tobytes()
            parts += [_ROW.pack(row.row, LogitsKind.FULL, len(logits) // 4, 0, False, row.log_sum_exp), logits]
        else:
            n = len(row.ids)
            has_below = bool(row.below)
            parts.append(_ROW.pack(row.row, LogitsKind.TOP, n, row.n_also, has_below, row.log_sum_exp))
            parts += [pack_ints(row.ids), struct.pack(f"<{n}f", *row.logits)]
            if has_below:
                parts.append(struct.pack(f"<{n}f", *row.below))
    return b"".join(parts)


def read_result(payload: Payload) -> RunResult:
    """The inverse of `result_message`."""
    view = memoryview(payload)
    check_version(view)
    _, flags, n_spans, run, n_rows = _RESULT.unpack_from(view)
    spans, at = read_spans(view, _RESULT.size, n_spans)
    rows = []
    for _ in range(n_rows):
        row, kind, n, n_also, has_below, log_sum_exp = _ROW.unpack_from(view, at)
        at += _ROW.size
        if kind == LogitsKind.TOP:
            ids = tuple(read_ints(view, at, n))
            logits = struct.unpack_from(f"<{n}f", view, at + 4 * n)
            at += 8 * n
            below: tuple[float, ...] = ()
            if has_below:
                below = struct.unpack_from(f"<{n}f", view, at)
                at += 4 * n
            rows.append(RowLogits(row, ids, logits, log_sum_exp, n_also, below=below))
        else:
            rows.append(RowLogits(row, None, np.frombuffer(view, "<f4", n, at), log_sum_exp))
            at += 4 * n
    return RunResult(run, tuple(rows), spans, bool(flags & _CANCELLED))


def cancel_message(cancelled: CancelRuns) -> Payload:
    """Runs to cancel, and dead rows of others, as one message."""
    runs, rows = cancelled.runs, cancelled.dead_rows
    return b"".join((
        _CANCEL.pack(VERSION, len(runs)),
        struct.pack(f"<{len(runs)}q", *runs),
        *(ROW_OF_RUN.pack(run, row) for run, row in rows),
    ))  # fmt: skip


def read_cancel(payload: Payload) -> CancelRuns:
    """The inverse of `cancel_message`."""
    view = memoryview(payload)
    check_version(view)
    _, n_runs = _CANCEL.unpack_from(view)
    at = _CANCEL.size + 8 * n_runs
    rows = tuple((run, row) for run, row in ROW_OF_RUN.iter_unpack(view[at:]))
    return CancelRuns(struct.unpack_from(f"<{n_runs}q", view, _CANCEL.size), rows)


def fetch_message(request: int, run: int, row: int) -> Payload:
    """That a row which the last rank kept is to be sent whole."""
    return _FETCH.pack(VERSION, request, run, row)


def read_fetch(payload: Payload) -> tuple[int, int, int]:
    """The inverse of `fetch_message`: the numbers of request, run and row."""
    view = memoryview(payload)
    check_version(view)
    _, request, run, row = _FETCH.unpack_from(view)
    return request, run, row


def fetched_message(request: int, row: RowLogits) -> Payload:
    """A whole row, for a request."""
    return _FETCHED.pack(VERSION, request, row.row) + np.asarray(row.logits, "<f4").tobytes()


def read_fetched(payload: Payload) -> tuple[int, RowLogits]:
    """The inverse of `fetched_message`."""
    view = memoryview(payload)
    check_version(view)
    _, request, row = _FETCHED.unpack_from(view)
    return request, RowLogits(row, None, np.frombuffer(view, "<f4", offset=_FETCHED.size), 0.0)


def states_message(run: Run, layers: Sequence[int], inputs: Sequence[NDArray[np.float32]]) -> Payload:
    """The inputs of these layers in a run's rows, (rows, width) for each layer, as one message."""
    width = inputs[0].shape[1] if inputs else 0
    table = [x for row in run.rows for x in (row.request, row.pos)]
    return b"".join((
        _STATES.pack(VERSION, run.id, len(run.rows), len(layers), width),
        struct.pack(f"<{len(layers)}i", *layers),
        struct.pack(f"<{len(table)}q", *table),
        *(np.ascontiguousarray(rows, "<f4").tobytes() for rows in inputs),
    ))  # fmt: skip


def read_states(payload: Payload) -> tuple[int, tuple[tuple[int, int], ...], dict[int, NDArray[np.float32]]]:
    """The inverse of `states_message`: a run, request and position of each of its rows, the inputs by layer."""
    view = memoryview(payload)
    check_version(view)
    _, run, n_rows, n_layers, width = _STATES.unpack_from(view)
    layers, at = read_ints(view, _STATES.size, n_layers), _STATES.size + 4 * n_layers
    table = struct.unpack_from(f"<{2 * n_rows}q", view, at)
    at += 16 * n_rows
    inputs: dict[int, NDArray[np.float32]] = {}
    for layer in layers:
        inputs[layer] = np.frombuffer(view, "<f4", n_rows * width, at).reshape(n_rows, width)
        at += 4 * n_rows * width
    return run, tuple(zip(table[::2], table[1::2], strict=True)), inputs


def part_span_message(run: int, span: Span) -> Payload:
    """A part's time on a run, as one message."""
    return _PART_SPAN.pack(VERSION, run) + pack_spans((span,))


def read_part_span(payload: Payload) -> tuple[int, Span]:
    """The inverse of `part_span_message`: the run's number, and the time."""
    view = memoryview(payload)
    check_version(view)
    (span,), _ = read_spans(view, _PART_SPAN.size, 1)
    return _PART_SPAN.unpack_from(view)[1], span


def pack_spans(spans: Sequence[Span]) -> bytes:
    """Spans as bytes; `read_spans` is the inverse."""
    return b"".join(_SPAN.pack(s.rank, s.start_s, s.compute_s, s.busy_s, s.sent_bytes, s.n_rows) for s in spans)


def pack_ints(values: Sequence[int]) -> bytes:
    """32-bit integers as bytes; `read_ints` is the inverse."""
    return struct.pack(f"<{len(values)}i", *values)


def read_ints(view: memoryview, at: int, n: int) -> tuple[int, ...]:
    """The `n` integers from byte `at` on."""
    return struct.unpack_from(f"<{n}i", view, at)


def read_spans(view: memoryview, at: int, n: int) -> tuple[tuple[Span, ...], int]:
    """The `n` spans from byte `at` on, and where they end."""
    end = at + n * _SPAN.size
    spans = tuple(
        Span(rank=rank, start_s=start_s, compute_s=compute_s, busy_s=busy_s, sent_bytes=sent_bytes, n_rows=n_rows)
        for rank, start_s, compute_s, busy_s, sent_bytes, n_rows in _SPAN.iter_unpack(view[at:end])
    )
    return spans, end


def check_version(view: memoryview) -> None:
    """Raises RunError for a message of another format."""
    if view[0] != VERSION:
        raise RunError(f"a message of format {view[0]} arrived, this rank speaks {VERSION}: use one ggpipe everywhere")

"""Messages to drafters, and their draft tokens, as bytes. The format is that of `codec`."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import msgspec

from ggpipe.core.draft_messages import (
    Accepted,
    BeginDrafting,
    BlockOf,
    DrafterMessage,
    EndDrafting,
    Expansion,
    MicroBatch,
    Shared,
    SharedToken,
)
from ggpipe.core.messages import RunRecord
from ggpipe.errors import RunError
from ggpipe.transport.base import Payload
from ggpipe.transport.codec import (
    ROW_OF_RUN,
    VERSION,
    check_version,
    pack_ints,
    pack_spans,
    read_ints,
    read_spans,
)

# version, kind, request, epoch, look-ahead, least path, random numbers taken, tokens
_TO_DRAFTER = struct.Struct("<BBqqidqI")
_BEGIN, _ACCEPTED, _DONE, _SHARED = 1, 2, 3, 4
_BEGIN_DECODER = msgspec.msgpack.Decoder(BeginDrafting)  # once a request: no hot path
_SHARED_DECODER = msgspec.msgpack.Decoder(tuple[SharedToken, ...])
# version, complete, block, drafter, request, epoch, expansions, runs
_MICRO_BATCH = struct.Struct("<BBBHqqII")
_EXPANSION = struct.Struct("<iiIII")
_CANDIDATE = struct.Struct("<id")
# run, request, rows, draft tokens, cancelled, spans
_RECORD = struct.Struct("<qqIIIBH")


def drafter_message(message: DrafterMessage) -> Payload:
    """A message to a drafter."""
    match message:
        case Accepted(request, epoch, tokens, look_ahead, least_path, rows, n_drawn):
            head = _TO_DRAFTER.pack(VERSION, _ACCEPTED, request, epoch, look_ahead, least_path, n_drawn, len(tokens))
            return b"".join((head, pack_ints(tokens), *(ROW_OF_RUN.pack(*row) for row in rows)))
        case EndDrafting(request):
            return _TO_DRAFTER.pack(VERSION, _DONE, request, 0, 0, 0.0, 0, 0)
        case Shared(request, epoch, shared):
            return _TO_DRAFTER.pack(VERSION, _SHARED, request, epoch, 0, 0.0, 0, 0) + msgspec.msgpack.encode(shared)
        case BeginDrafting():
            return _TO_DRAFTER.pack(VERSION, _BEGIN, message.request, 0, 0, 0.0, 0, 0) + msgspec.msgpack.encode(message)


def read_drafter_message(payload: Payload) -> DrafterMessage:
    """The inverse of `drafter_message`."""
    view = memoryview(payload)
    check_version(view)
    _, kind, request, epoch, look_ahead, least_path, n_drawn, n = _TO_DRAFTER.unpack_from(view)
    tokens = read_ints(view, _TO_DRAFTER.size, n)
    if kind == _ACCEPTED:
        rows = tuple(ROW_OF_RUN.iter_unpack(view[_TO_DRAFTER.size + 4 * n :]))
        return Accepted(request, epoch, tokens, look_ahead, least_path, rows, n_drawn)
    if kind == _DONE:
        return EndDrafting(request)
    try:
        if kind == _SHARED:
            return Shared(request, epoch, _SHARED_DECODER.decode(view[_TO_DRAFTER.size :]))
        return _BEGIN_DECODER.decode(view[_TO_DRAFTER.size :])
    except msgspec.MsgspecError as e:
        raise RunError(f"an unreadable message to the draft arrived ({e}): use one ggpipe everywhere") from e


def micro_batch_message(batch: MicroBatch, records: Sequence[RunRecord]) -> Payload:
    """Draft tokens as one message, with the drafter's runs that ended since the last one, for statistics."""
    parts = [
        _MICRO_BATCH.pack(
            VERSION,
            batch.complete,
            batch.block,
            batch.drafter,
            batch.request,
            batch.epoch,
            len(batch.expansions),
            len(records),
        )
    ]
    for expansion in batch.expansions:
        own, again = expansion.candidates, expansion.again
        parts.append(_EXPANSION.pack(expansion.parent, expansion.first, expansion.n, len(own), len(again)))
        parts += [_CANDIDATE.pack(token, prob) for token, prob in (*own, *again)]
    for record in records:
        head = _RECORD.pack(
            record.id,
            record.request,
            record.n_rows,
            record.n_run_rows,
            record.n_draft_tokens,
            record.cancelled,
            len(record.spans),
        )
        parts += [head, pack_spans(record.spans)]
    return b"".join(parts)


def read_micro_batch(payload: Payload) -> tuple[MicroBatch, tuple[RunRecord, ...]]:
    """The inverse of `micro_batch_message`."""
    view = memoryview(payload)
    check_version(view)
    _, complete, block, drafter, request, epoch, n_expansions, n_records = _MICRO_BATCH.unpack_from(view)
    at = _MICRO_BATCH.size
    expansions = []
    for _ in range(n_expansions):
        parent, first, n, n_candidates, n_again = _EXPANSION.unpack_from(view, at)
        at += _EXPANSION.size
        end = at + (n_candidates + n_again) * _CANDIDATE.size
        found = tuple(_CANDIDATE.iter_unpack(view[at:end]))
        expansions.append(Expansion(parent, first, n, found[:n_candidates], found[n_candidates:]))
        at = end
    records = []
    for _ in range(n_records):
        run, request_id, n_rows, n_run_rows, n_draft_tokens, cancelled, n_spans = _RECORD.unpack_from(view, at)
        spans, at = read_spans(view, at + _RECORD.size, n_spans)
        record = RunRecord(
            id=run,
            request=request_id,
            n_rows=n_rows,
            n_run_rows=n_run_rows,
            n_draft_tokens=n_draft_tokens,
            cancelled=bool(cancelled),
            spans=spans,
        )
        records.append(record)
    batch = MicroBatch(
        request=request,
        epoch=epoch,
        expansions=tuple(expansions),
        complete=bool(complete),
        drafter=drafter,
        block=BlockOf(block),
    )
    return batch, tuple(records)

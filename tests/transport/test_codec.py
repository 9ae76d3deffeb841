"""Messages come out as they went in."""

import math
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from support.requests import ADJUSTED, DRAWN

from ggpipe.config.speculation import SpeculationConfig
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
from ggpipe.core.events import CancelRuns
from ggpipe.core.messages import (
    KvKind,
    KvOp,
    LogitsKind,
    LogitsRequest,
    Row,
    RowLogits,
    Run,
    RunRecord,
    RunResult,
    Save,
    Span,
)
from ggpipe.errors import RunError
from ggpipe.transport import codec, draft_codec

INT32 = st.integers(-(2**31), 2**31 - 1)
INT64 = st.integers(-(2**63), 2**63 - 1)
UINT32 = st.integers(0, 2**32 - 1)
SECONDS = st.floats(0, 1e6)
FLOAT32 = st.floats(width=32, allow_nan=False)

SPANS = st.lists(
    st.builds(Span, rank=INT32, start_s=SECONDS, compute_s=SECONDS, busy_s=SECONDS, sent_bytes=INT64, n_rows=UINT32),
    max_size=5,
).map(tuple)
OPS = st.lists(st.builds(KvOp, st.sampled_from(KvKind), INT32, INT32, INT32, INT32), max_size=4).map(tuple)
BANNED = st.lists(INT32, max_size=5).map(tuple)
LOGITS_REQUESTS = st.lists(st.builds(LogitsRequest, st.sampled_from(LogitsKind), UINT32, BANNED), max_size=4).map(tuple)
SEQS = st.lists(INT32, max_size=4).map(tuple)
ROW = st.builds(Row, token=INT32, pos=INT32, seqs=SEQS, request=INT32, logits_request=st.integers(-1, 3))
ROWS = st.lists(ROW, max_size=9).map(tuple)
SAVES = st.none() | st.builds(Save, INT32, INT32, st.lists(INT32, max_size=9).map(tuple))
RUNS = st.builds(
    Run,
    id=INT64,
    rows=ROWS,
    ops=OPS,
    logits_requests=LOGITS_REQUESTS,
    cancelled=st.booleans(),
    save=SAVES,
    kept_from=INT64,
)


@st.composite
def row_logits(draw: st.DrawFn) -> RowLogits:
    row, log_sum_exp = draw(INT32), draw(st.floats(allow_nan=False))
    values = draw(st.lists(FLOAT32, max_size=9))
    if draw(st.booleans()):
        return RowLogits(row, None, np.array(values, np.float32), log_sum_exp)
    ids = draw(st.lists(INT32, min_size=len(values), max_size=len(values)))
    return RowLogits(row, tuple(ids), tuple(values), log_sum_exp, draw(st.integers(0, len(ids))))


TOKENS = st.lists(INT32, max_size=9).map(tuple)
PROBABILITY = st.floats(0, 1)
SPECULATIONS = st.builds(
    SpeculationConfig,
    mode=st.sampled_from(["speculative", "async"]),
    n_draft=st.integers(8, 99),
    n_min=st.integers(0, 8),
    p_accept=PROBABILITY,
    p_split=PROBABILITY,
    p_recovery=PROBABILITY,
    p_decay=PROBABILITY,
    n_parallel=st.integers(1, 9),
    n_draft_rows=st.none() | st.integers(1, 9),
    cancel=st.booleans(),
    continuous=st.booleans(),
)
DRAFTER_MESSAGES = st.one_of(
    st.builds(
        BeginDrafting,
        request=INT64,
        prompt=TOKENS,
        n_left=INT32,
        look_ahead=INT32,
        ends=TOKENS.map(frozenset),
        banned=TOKENS,
        speculation=SPECULATIONS,
        drawing=st.sampled_from([None, DRAWN]),
        adjustments=st.sampled_from([None, ADJUSTED]),
    ),
    st.builds(
        Accepted,
        INT64,
        INT64,
        TOKENS,
        INT32,
        PROBABILITY,
        st.lists(st.tuples(INT64, INT32), max_size=5).map(tuple),
        INT64,
    ),
    st.builds(
        Shared, INT64, INT64, st.lists(st.builds(SharedToken, TOKENS, INT32, PROBABILITY), max_size=3).map(tuple)
    ),
    st.builds(EndDrafting, INT64),
)
CANDIDATES = st.lists(st.tuples(INT32, PROBABILITY), max_size=5).map(tuple)
EXPANSIONS = st.lists(st.builds(Expansion, INT32, INT32, UINT32, CANDIDATES, CANDIDATES), max_size=4).map(tuple)
BATCHES = st.builds(
    MicroBatch,
    request=INT64,
    epoch=INT64,
    expansions=EXPANSIONS,
    complete=st.booleans(),
    drafter=st.integers(0, 65535),
    block=st.sampled_from(BlockOf),
)
RECORDS = st.lists(
    st.builds(
        RunRecord,
        id=INT64,
        request=INT64,
        n_rows=UINT32,
        n_run_rows=UINT32,
        n_draft_tokens=UINT32,
        cancelled=st.booleans(),
        spans=SPANS,
    ),
    max_size=3,
)
RESULTS = st.builds(RunResult, INT64, st.lists(row_logits(), max_size=4).map(tuple), SPANS, st.booleans())


def header(run: Run, spans: tuple[Span, ...]) -> bytes:
    return codec.header_with(codec.run_header(run), spans, run.cancelled)


@given(RUNS, SPANS, st.binary(max_size=40))
def test_runs(run: Run, spans: tuple[Span, ...], activations: bytes) -> None:
    message = header(run, spans) + activations
    read, _, read_spans, at = codec.read_run(message)
    assert read == run
    assert read_spans == spans
    assert bytes(message[at:]) == activations


@given(RUNS, SPANS)
def test_activations_start_at_a_multiple_of_8_bytes(run: Run, spans: tuple[Span, ...]) -> None:
    data = header(run, spans)
    assert len(data) % 8 == 0
    assert codec.read_run(data)[3] == len(data)


@given(RUNS, SPANS, SPANS)
def test_a_stage_hands_on_the_header_it_got(run: Run, spans: tuple[Span, ...], more: tuple[Span, ...]) -> None:
    _, without_spans, before, _ = codec.read_run(header(run, spans))
    assert without_spans[4:] == codec.run_header(run)[4:]
    again, _, after, _ = codec.read_run(codec.header_with(without_spans, (*before, *more), run.cancelled))
    assert again == run
    assert after == (*spans, *more)


@given(RUNS, st.data())
def test_the_header_is_as_long_with_a_placeholder(run: Run, data: st.DataObject) -> None:
    """A stage leaves room for a header before it knows its own times, or that the run is cancelled."""
    spans = data.draw(SPANS)
    others = data.draw(st.lists(SPANS.filter(len), min_size=len(spans), max_size=len(spans)))
    replaced = tuple(other[0] for other in others)
    placeholder = header(run, spans)
    final = header(structs.replace(run, cancelled=not run.cancelled), replaced)
    assert len(placeholder) == len(final)


@pytest.mark.parametrize("n_mask", [1, 8, 99])
def test_a_row_mask_is_stepped_over(n_mask: int) -> None:
    """Room for later: a header that says that it has one has its activations behind it."""
    fields = "<BBHIqqIIIIII"  # the last one is the mask's size in bytes
    data = bytearray(header(Run(id=1, rows=()), ()))
    struct.pack_into("<I", data, struct.calcsize(fields) - 4, n_mask)
    at = codec.read_run(bytes(data) + bytes(n_mask + 8))[3]
    assert at % 8 == 0
    assert 0 <= at - struct.calcsize(fields) - n_mask < 8


def test_a_branching_run() -> None:
    rows = (
        Row(token=5, pos=10, seqs=(0, 1, 2), request=7),
        Row(token=6, pos=11, seqs=(0,), request=7, logits_request=0),
        Row(token=7, pos=11, seqs=(1, 2), request=7, logits_request=0),
        Row(token=8, pos=12, seqs=(2,), request=7, logits_request=1),
    )
    ops = (KvOp(KvKind.RM, 3, p0=4), KvOp(KvKind.CP, 0, 1, 0, 10))
    wants = (
        LogitsRequest(LogitsKind.TOP, 40, (2, 3), True, False, (7, 9), temp=0.7),
        LogitsRequest(LogitsKind.FULL, 1, (0,)),
    )
    run = Run(id=2**40, rows=rows, ops=ops, logits_requests=wants)
    spans = (
        Span(rank=0, start_s=7.5, compute_s=0.25, busy_s=0.5, sent_bytes=4096, n_rows=1),
        Span(rank=1, start_s=8.0, compute_s=1e-6, busy_s=2e-6, sent_bytes=2**33, n_rows=1),
    )
    read, _, read_spans, _ = codec.read_run(header(run, spans))
    assert (read, read_spans) == (run, spans)
    assert [type(op.kind) for op in read.ops] == [KvKind] * 2
    assert [type(want.kind) for want in read.logits_requests] == [LogitsKind] * 2


def test_a_want_for_each_of_many_rows() -> None:
    """Where penalties look back, each draft token takes one more of the best logits than the one before it."""
    wants = tuple(LogitsRequest(LogitsKind.TOP, 40 + i, (2,)) for i in range(300))
    run = Run(
        id=1,
        rows=tuple(Row(token=i, pos=i, seqs=(0,), request=1, logits_request=i) for i in range(300)),
        ops=(),
        logits_requests=wants,
    )
    assert codec.read_run(header(run, ()))[0] == run


def test_many_stages() -> None:
    """As many as libllama takes layers."""
    spans = tuple(
        Span(rank=rank, start_s=1.0, compute_s=2.0, busy_s=3.0, sent_bytes=4, n_rows=1) for rank in range(512)
    )
    result, record = (
        RunResult(1, (), spans),
        RunRecord(id=1, request=1, n_rows=2, n_run_rows=2, n_draft_tokens=1, cancelled=False, spans=spans),
    )
    assert codec.read_run(header(Run(id=1, rows=()), spans))[2] == spans
    assert codec.read_result(codec.result_message(result)) == result
    assert draft_codec.read_micro_batch(
        draft_codec.micro_batch_message(MicroBatch(request=1, epoch=0, expansions=(), complete=False), [record])
    )[1] == (record,)


@given(RESULTS)
def test_results(result: RunResult) -> None:
    read = codec.read_result(codec.result_message(result))
    assert (read.run, read.spans, read.cancelled) == (result.run, result.spans, result.cancelled)
    assert len(read.rows) == len(result.rows)
    for got, sent in zip(read.rows, result.rows, strict=True):
        assert (got.row, got.ids, got.log_sum_exp) == (sent.row, sent.ids, sent.log_sum_exp)
        if sent.ids is None:
            assert isinstance(got.logits, np.ndarray)
            assert got.logits.dtype == np.float32
            assert np.array_equal(got.logits, np.asarray(sent.logits))
        else:
            assert got.logits == sent.logits


def test_shares_of_smaller_ids() -> None:
    rows = (
        RowLogits(0, (7, 3), (1.5, 0.25), 2.0, below=(0.5, 0.125)),
        RowLogits(1, (5,), (1.0,), 2.0),
        RowLogits(2, (9, 4, 1), (3.0, 2.0, 1.0), 4.0, 1, below=(0.75, 0.25, 0.0)),
    )
    result = RunResult(1, rows, ())
    assert codec.read_result(codec.result_message(result)) == result


def test_banned_tokens_keep_their_minus_infinity() -> None:
    full = np.array([1.5, -math.inf, 0.25], np.float32)
    result = RunResult(1, (RowLogits(0, None, full, 0.0), RowLogits(3, (2,), (-math.inf,), -math.inf)), ())
    first, second = codec.read_result(codec.result_message(result)).rows
    assert np.array_equal(np.asarray(first.logits), full)
    assert (second.logits, second.log_sum_exp) == ((-math.inf,), -math.inf)


@given(st.lists(INT64, max_size=9).map(tuple), st.lists(st.tuples(INT64, st.integers(0, 2**31 - 1)), max_size=9))
def test_cancels(runs: tuple[int, ...], rows: list[tuple[int, int]]) -> None:
    cancelled = CancelRuns(runs, tuple(rows))
    assert codec.read_cancel(codec.cancel_message(cancelled)) == cancelled


@given(st.data(), st.integers(1, 70))
def test_a_stage_drops_rows_of_a_run_on_its_way(data: st.DataObject, n_rows: int) -> None:
    dropped = data.draw(st.lists(st.frozensets(st.integers(0, n_rows - 1)), min_size=1))
    rows = tuple(Row(token=i, pos=i, seqs=(i % 3,), request=1) for i in range(n_rows))
    run = Run(id=7, rows=rows, logits_requests=(LogitsRequest(LogitsKind.TOP, 3),))
    own, lengths = codec.run_header(run), set()
    for numbers in dropped:
        own = codec.header_without(own, n_rows, numbers)
        read, passed_on, spans, at = codec.read_run(codec.header_with(own, (), False) + b"activations")
        assert (read, passed_on, spans) == (structs.replace(run, dropped=numbers), own, ())
        lengths.add((len(own), at))
    assert len(lengths) == 1, "the length depends on which rows are dropped"
    assert codec.run_header(structs.replace(run, dropped=dropped[-1])) == (
        own if dropped[-1] else codec.run_header(run)
    )


@pytest.mark.parametrize("version", [0, codec.VERSION + 1, 255])
def test_another_version_is_refused_in_one_line(version: int) -> None:
    run = bytearray(header(Run(id=1, rows=()), ()))
    result = bytearray(codec.result_message(RunResult(1, (), ())))
    run[0] = result[0] = version
    for read, message in ((codec.read_run, run), (codec.read_result, result)):
        with pytest.raises(RunError) as caught:
            read(message)
        assert str(caught.value) == (
            f"a message of format {version} arrived, this rank speaks {codec.VERSION}: use one ggpipe everywhere"
        )
        assert caught.value.exit_code == 1


@pytest.mark.parametrize("rest", [b"", b"\x80", b"{}", b"\xff"])
def test_a_damaged_request_to_the_draft_is_refused_in_one_line(rest: bytes) -> None:
    begin = draft_codec.drafter_message(
        BeginDrafting(
            request=1,
            prompt=(2, 3),
            n_left=4,
            look_ahead=5,
            ends=frozenset(),
            banned=(),
            speculation=SpeculationConfig(),
        )
    )
    start = len(draft_codec.drafter_message(EndDrafting(1)))
    with pytest.raises(RunError, match="use one ggpipe everywhere"):
        draft_codec.read_drafter_message(bytes(begin[:start]) + rest)


@given(DRAFTER_MESSAGES)
def test_steering(message: DrafterMessage) -> None:
    assert draft_codec.read_drafter_message(draft_codec.drafter_message(message)) == message


@given(RUNS, st.lists(INT32, unique=True, max_size=3), st.integers(1, 9))
def test_states(run: Run, layers: list[int], width: int) -> None:
    inputs = [np.arange(len(run.rows) * width, dtype=np.float32).reshape(-1, width) + layer for layer in layers]
    number, rows, found = codec.read_states(codec.states_message(run, layers, inputs))
    assert (number, rows) == (run.id, tuple((row.request, row.pos) for row in run.rows))
    assert list(found) == layers
    assert all(np.array_equal(found[layer], own) for layer, own in zip(layers, inputs, strict=True))


@given(BATCHES, RECORDS)
def test_micro_batches(batch: MicroBatch, records: list[RunRecord]) -> None:
    assert draft_codec.read_micro_batch(draft_codec.micro_batch_message(batch, records)) == (batch, tuple(records))


@given(INT64, SPANS)
def test_times_of_parts(run: int, spans: tuple[Span, ...]) -> None:
    for span in spans:
        assert codec.read_part_span(codec.part_span_message(run, span)) == (run, span)


def test_a_greedy_result_is_small() -> None:
    rows = tuple(RowLogits(i, (i,), (0.5,), math.nan) for i in range(64))
    spans = tuple(Span(rank=i, start_s=1.0, compute_s=2.0, busy_s=3.0, sent_bytes=4, n_rows=1) for i in range(8))
    assert len(codec.result_message(RunResult(1, rows, spans))) < 4096

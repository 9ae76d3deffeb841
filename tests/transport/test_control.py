"""Control messages: what is sent is what is received, and everything else is refused in one line."""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ggpipe.config.layer_split import MAX_PARTS, LayerSplit
from ggpipe.core.row_work import RowWork
from ggpipe.errors import RunError, Setting, Wording
from ggpipe.transport import control
from ggpipe.transport.control import AnyControlMessage, Quit, RankFailed
from ggpipe.transport.loading_messages import ControlMessage, Hello, StageLoading

KINDS: tuple[type[ControlMessage], ...] = typing.get_args(AnyControlMessage)
PLAIN: dict[object, st.SearchStrategy[Any]] = {
    int: st.integers(-(2**63), 2**63 - 1),
    float: st.floats(allow_nan=False),
    str: st.text(),
    bytes: st.binary(),
    bool: st.booleans(),
    type(None): st.none(),
}


def values(kind: Any) -> st.SearchStrategy[Any]:
    """Values of a field's type."""
    arguments = typing.get_args(kind)
    if typing.get_origin(kind) is typing.Annotated:
        base, *bounds = arguments
        least = max((b.ge for b in bounds if isinstance(b, msgspec.Meta) and b.ge is not None), default=None)
        above = max((b.gt for b in bounds if isinstance(b, msgspec.Meta) and b.gt is not None), default=None)
        return values(base).filter(lambda value: (least is None or value >= least) and (above is None or value > above))
    if isinstance(kind, types.UnionType):
        return st.one_of(*map(values, arguments))
    if typing.get_origin(kind) is tuple:
        if arguments[1:] == (...,):
            return st.lists(values(arguments[0]), max_size=4).map(tuple)
        return st.tuples(*map(values, arguments))
    if typing.get_origin(kind) is dict:
        return st.dictionaries(*map(values, arguments), max_size=4)
    if kind is Wording:
        return st.lists(st.text() | st.builds(Setting, st.text()), max_size=3).map(lambda parts: Wording(*parts))
    if kind is LayerSplit:
        stages = st.lists(st.tuples(values(float), st.integers(1, MAX_PARTS)), min_size=1, max_size=4)
        return stages.map(lambda given: LayerSplit(*zip(*given, strict=True)))
    if dataclasses.is_dataclass(kind) or (isinstance(kind, type) and issubclass(kind, msgspec.Struct)):
        fields = typing.get_type_hints(kind, include_extras=True)
        return st.builds(lambda given: kind(**given), st.fixed_dictionaries({n: values(t) for n, t in fields.items()}))  # type: ignore[operator]
    return PLAIN[kind]


MESSAGES = st.one_of(*map(values, KINDS))
FAILED = RankFailed("rank 1 (node1)", "RunError", Wording("broke"))
HELLO = Hello(
    host="node1",
    model=0,
    fingerprint="0123456789abcdef",
    architecture="llama",
    n_layer=32,
    work=RowWork(),
    ggpipe="0.1.0",
    libllama="b1",
    cpu_features=("avx2", "fma"),
    memory_bytes=8_000_000_000,
    n_threads=8,
    n_cores=8,
    kind="draft",
)


def refused(payload: bytes) -> str:
    """The one line that says why."""
    with pytest.raises(RunError) as caught:
        control.decode(payload)
    text = str(caught.value)
    assert "\n" not in text
    assert text.endswith("use one ggpipe everywhere")
    return text


def tagged(content: object) -> bytes:
    return bytes((control.VERSION,)) + msgspec.msgpack.encode(content)


def test_every_message_can_be_received() -> None:
    assert set(KINDS) == set(ControlMessage.__subclasses__())


@given(MESSAGES)
def test_round_trip(message: AnyControlMessage) -> None:
    assert control.decode(control.encode(message)) == message
    assert control.decode(bytearray(control.encode(message))) == message  # as MPI delivers it


def test_messages_cannot_change() -> None:
    with pytest.raises(AttributeError):
        HELLO.host = "node2"  # type: ignore[misc]


@pytest.mark.parametrize("version", [0, control.VERSION - 1, control.VERSION + 1, ord("{"), 255])
def test_another_version_is_refused(version: int) -> None:
    payload = bytes((version,)) + control.encode(HELLO)[1:]
    expected = f"a control message of format {version} arrived, this rank reads format {control.VERSION}"
    assert refused(payload).startswith(expected)


@pytest.mark.parametrize("tag", ["Hallo", "ControlMessage", "", None, 7])
def test_unknown_messages_are_refused(tag: object) -> None:
    assert "unreadable" in refused(tagged({"type": tag}))


@pytest.mark.parametrize(
    "content",
    [
        {"type": "Quit"},
        {"type": "Quit", "exit_code": "0"},
        {"type": "Quit", "exit_code": 0, "signal": 9},
        {"type": "Load", "layout": {"stages": [{"layers": [0, 1, 2], "ranks": [0]}], "head": 0}},
        {"exit_code": 0},
        ["Quit", 0],
        None,
    ],
)
def test_other_fields_are_refused(content: object) -> None:
    assert "unreadable" in refused(tagged(content))


@given(MESSAGES, st.data())
def test_truncated_messages_are_refused(message: AnyControlMessage, data: st.DataObject) -> None:
    payload = control.encode(message)
    refused(payload[: data.draw(st.integers(0, len(payload) - 1))])


@given(st.binary(max_size=60))
def test_any_bytes_are_a_message_or_refused(data: bytes) -> None:
    payload = bytes((control.VERSION,)) + data
    try:
        message = control.decode(payload)
    except RunError:
        refused(payload)
    else:
        assert isinstance(message, KINDS)


@given(
    st.sampled_from([HELLO, Quit(3), StageLoading(1, 2), RankFailed("rank 1 (node1)", "RunError", Wording("broke"))]),
    st.data(),
)
def test_a_flipped_byte_is_a_message_or_refused(message: ControlMessage, data: st.DataObject) -> None:
    payload = bytearray(control.encode(message))
    payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    try:
        assert isinstance(control.decode(payload), KINDS)
    except RunError:
        refused(bytes(payload))


def test_bytes_that_are_no_text_are_refused() -> None:
    payload = control.encode(FAILED).replace(b"broke", b"br\xffke")
    assert "unreadable" in refused(payload)


@pytest.mark.parametrize("count", [b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff"])
def test_counts_beyond_the_message_are_refused(count: bytes) -> None:
    """Array, map and text of 4 billion items."""
    payload = control.encode(HELLO).replace(msgspec.msgpack.encode(("avx2", "fma"))[:1], count)
    refused(payload)


def test_deep_nesting_is_refused() -> None:
    refused(bytes((control.VERSION,)) + b"\x91" * 100_000)
    inner = msgspec.msgpack.encode({"type": "Load", "layout": 0})[:-1]
    refused(bytes((control.VERSION,)) + inner + b"\x91" * 100_000)

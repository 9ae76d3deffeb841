"""Text that a grammar forces: names of properties, quotes, brackets, the rest of a word from a list.

llguidance follows the output here byte by byte, through the same grammar for JSON without whitespace. So it says which
bytes must come next. Whitespace between the parts of JSON is not forced: each model has its own habits. They are taken
from the output so far, and before there is any, from earlier outputs. The text is then split into tokens as the model
would do it.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ggpipe.errors import UsageError
from ggpipe.llama.llguidance import TokenizeFunction, library, new_matcher, new_tokenizer
from ggpipe.llama.vocab import Vocab
from ggpipe.text.grammar.json_schema import without_whitespace

_SPECIAL = b"\xff"
_MOST_BYTES = 160  # of forced text at a time
_MOST_PATH = 96  # draft tokens before it
_AT_ONCE_S, _SHARE = 0.1, 0.05  # of the head's time: some grammars are slow to follow
_SPACES = frozenset(b" \t\n\r")
_OPENS, _CLOSES, _MARKS = frozenset(b"{["), frozenset(b"}]"), frozenset(b'{}[],:"')
_SEPARATORS = frozenset(b",:")
_QUOTE, _BACKSLASH = b'"\\'
_INSIDE, _SPACED, _LAST, _UNKNOWN = 0.97, 0.9, 0.8, 0.5
"""Probability of a token within forced text, of one with whitespace that the output has used before, of the last one,
which may be a part of a longer token, and of one with whitespace as in other outputs. What a request shows of them
corrects these (`core.drafters.calibration`)."""


class Spacing:
    """Which whitespace is between the parts of JSON, by place and depth: after a bracket that opens (`{`), a comma or a
    colon, before a bracket that closes (`}`), and before a comma or a colon (`<,`, `<:`)."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, int], bytes] = {}

    def saw(self, place: str, depth: int, space: bytes) -> None:
        """This whitespace was there, which may be empty."""
        self._seen.pop((place, depth), None)  # the latest comes last
        self._seen[place, depth] = space

    def copy(self) -> Spacing:
        """Another one that knows the same."""
        other = Spacing()
        other._seen.update(self._seen)
        return other

    def at(self, place: str, depth: int) -> bytes | None:
        """The whitespace that is usual there; None: nothing is known."""
        if (space := self._seen.get((place, depth))) is not None:
            return space
        latest, is_line = reversed(self._seen.items()), place in _LINES
        alike = next((one for one in latest if one[0][0] in _ALIKE[place] or (is_line and b"\n" in one[1])), None)
        return _indented(alike[1], alike[0][1], depth) if alike is not None else None


_ALIKE = {place: (place,) for place in (":", ",", "<:", "<,")} | {"{": ("{", "}"), "}": ("{", "}")}
"""By place: those with the same whitespace."""
_LINES = ("{", ",", "}")
"""Where lines break anywhere, they break in these places."""


def _indented(space: bytes, there: int, depth: int) -> bytes:
    """The whitespace of one depth as it would be at another."""
    line, found, indent = space.rpartition(b"\n")
    if not found:
        return space
    unit = len(indent) // there if there and indent else 2
    return line + found + (indent[:1] or b" ") * (unit * depth)


class ByteVocab:
    """Bytes as llguidance's tokens, next to a model's special tokens, which keep their ids. Thread-safe."""

    def __init__(self, vocab: Vocab) -> None:
        """Nothing is read before the first text."""
        self.vocab = vocab
        self.first = vocab.n_tokens
        """The token of byte 0; those of others follow."""
        self.ends = frozenset(vocab.end_tokens)
        self.special = self.ends
        """Tokens that have no text in a grammar."""
        self.habits = Spacing()
        """The spacing of all outputs. Only the thread that follows them uses it."""
        self._lock = threading.Lock()
        self._tokenizer: int | None = None
        self._function = TokenizeFunction(self._tokenize)

    def _tokenize(self, _: int | None, text: int, n: int, out: ctypes.Array[ctypes.c_uint32], room: int) -> int:
        for i, byte in enumerate(ctypes.string_at(text, min(n, room))):
            out[i] = self.first + byte
        return n

    def tokens_after(self, last: int | None, text: bytes) -> tuple[int, ...]:
        """The tokens of a text that follows the token `last`; None: it follows a special one."""
        string, vocab = text.decode(errors="ignore"), self.vocab
        before = vocab.piece(last).decode(errors="replace") if last is not None else ""
        try:
            tokens = vocab.inner_tokens(before + string)
            return tokens[1:] if before and tokens[:1] == (last,) else vocab.inner_tokens(string) if before else tokens
        except UsageError:
            return ()

    def text(self, lark: str) -> ForcedText | None:
        """The text that a grammar forces, at the beginning of the output. `lark`: as `text.grammar.check.check` returns
        it. None if llguidance cannot follow the grammar without whitespace. Raises RunError as `new_tokenizer`."""
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = self._read()
        matcher = new_matcher(self._tokenizer, without_whitespace(lark))
        found = ForcedText(self, matcher)
        if library().llg_matcher_get_error(matcher):
            found.close()
            return None
        return found

    def _read(self) -> int:
        self.special = frozenset((*self.vocab.special_tokens.values(), *self.ends))
        pieces = [b""] * self.first + [bytes((byte,)) for byte in range(256)]
        for token in self.special:
            pieces[token] = _SPECIAL + (self.vocab.text(token).encode() or b"%d" % token)
        return new_tokenizer(pieces, self.ends, self._function)

    def close(self) -> None:
        """Free it, after all `ForcedText`. A second call does nothing."""
        with self._lock:
            if self._tokenizer is not None:
                library().llg_free_tokenizer(self._tokenizer)
            self._tokenizer = None


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a text stands between the parts of JSON."""

    depth: int = 0
    """Brackets that are open."""
    mark: int = 0
    """The last byte outside strings, if it was one of `{[,:`; otherwise 0."""
    space: bytes = b""
    """Whitespace since then."""
    is_quoted: bool = False
    """It is within a string."""
    is_escaped: bool = False
    """A backslash was the last byte of the string so far."""

    def name_before(self, byte: int) -> str | None:
        """The place's name for `Spacing` if this byte comes next; None: there is never whitespace."""
        if byte in _CLOSES:
            return "}"
        if self.mark in _OPENS:
            return "{"
        if self.mark:
            return chr(self.mark)
        return f"<{chr(byte)}" if byte in _SEPARATORS else None

    def depth_before(self, byte: int) -> int:
        return self.depth - (byte in _CLOSES)

    def after(self, byte: int, is_mark: bool) -> _Place:
        """The place after a byte that is no whitespace between parts."""
        if self.is_quoted:
            ends = byte == _QUOTE and not self.is_escaped
            return _Place(self.depth, is_quoted=not ends, is_escaped=byte == _BACKSLASH and not self.is_escaped)
        if not is_mark or byte == _QUOTE:
            return _Place(self.depth, is_quoted=is_mark)
        depth = self.depth + (byte in _OPENS) - (byte in _CLOSES)
        return _Place(max(depth, 0), 0 if byte in _CLOSES else byte)


class ForcedText:
    """The text that a grammar forces after a part of the output (see the module's docstring)."""

    def __init__(self, vocab: ByteVocab, matcher: int) -> None:
        """`matcher`: llguidance's, which belongs to this from now on."""
        self._vocab = vocab
        self._own = library()
        self._matcher: int | None = matcher
        self._place = _Place()
        self._spacing = Spacing()
        self._last: int | None = None
        """The last token."""
        self._new: list[int] = []
        """Tokens that were accepted since the text was needed last."""
        self._ahead: list[tuple[int, _Place, int]] = []
        """Draft tokens that llguidance has followed: each with the place after it, and llguidance's tokens for it."""
        self._is_lost = False
        """The output is one that the grammar does not know without whitespace."""
        self._began, self._spent_s = time.monotonic(), 0.0
        """When this was made, and how long it took since then to say what is forced."""

    def clone(self) -> ForcedText:
        """Another one that stands where this one does."""
        assert self._matcher is not None
        self._go_back(0)
        other = ForcedText(self._vocab, self._own.llg_clone_matcher(self._matcher))
        other._place, other._last, other._is_lost = self._place, self._last, self._is_lost
        other._spacing, other._new = self._spacing.copy(), [*self._new]
        return other

    def accept(self, token: int) -> None:
        """The output continues with this token."""
        self._new.append(token)

    def _catch_up(self) -> None:
        if self._new:
            self._go_back(0)
        for token in self._new:
            if self._is_lost or token in self._vocab.ends:
                continue
            followed = self._follow(token, self._place, (self._spacing, self._vocab.habits))
            self._last = token
            if followed is None:
                self._is_lost = True
            else:
                self._place, _ = followed
        self._new.clear()

    def after(self, path: Sequence[int]) -> tuple[tuple[int, float], ...]:
        """The tokens that must follow these draft tokens, which follow the output, one after the other with the
        probability of each; empty where there is a choice."""
        start = time.monotonic()
        if self._spent_s > _AT_ONCE_S + _SHARE * (start - self._began) or len(path) > _MOST_PATH:
            return ()
        found = self._after(path)
        self._spent_s += time.monotonic() - start
        return found

    def _after(self, path: Sequence[int]) -> tuple[tuple[int, float], ...]:
        if self._matcher is None:
            return ()
        self._catch_up()
        if self._is_lost:
            return ()
        n = 0
        while n < min(len(path), len(self._ahead)) and path[n] == self._ahead[n][0]:
            n += 1
        self._go_back(n)
        for token in path[n:]:
            followed = self._follow(token, self._ahead[-1][1] if self._ahead else self._place)
            if followed is None:
                return ()
            self._ahead.append((token, *followed))
        parts = list(self._forced(self._ahead[-1][1] if self._ahead else self._place))
        self._own.llg_matcher_rollback(self._matcher, len(parts))
        return tuple(self._tokens(parts, path[-1] if path else self._last))

    def _go_back(self, n: int) -> None:
        """Keep only the first `n` draft tokens that were followed."""
        if ahead := sum(taken for _, _, taken in self._ahead[n:]):
            self._own.llg_matcher_rollback(self._matcher, ahead)
        del self._ahead[n:]

    # Bytes

    def _fits(self, token: int) -> bool:
        return bool(self._own.llg_matcher_validate_tokens(self._matcher, (ctypes.c_uint32 * 1)(token), 1) == 1)

    def _consume(self, token: int) -> None:
        self._own.llg_matcher_consume_token(self._matcher, token)

    def _is_mark(self, byte: int, place: _Place) -> bool:
        """Whether a byte that comes next is a bracket, a comma, a colon or a quote of JSON: where a space could be in
        its place, it is a part of some other text."""
        return byte in _MARKS and not place.is_quoted and not self._fits(self._vocab.first + ord(" "))

    def _follow(self, token: int, place: _Place, learns: Sequence[Spacing] = ()) -> tuple[_Place, int] | None:
        """Continue by a token. Returns the place after it and how many of llguidance's tokens that took; None, with
        nothing to roll back, where it does not fit."""
        if token in self._vocab.special:
            if token in self._vocab.ends or place.space or not self._fits(token):
                return None
            self._consume(token)
            return _Place(place.depth), 1
        n = 0
        for byte in self._vocab.vocab.piece(token):
            if self._fits(self._vocab.first + byte):
                is_mark = self._is_mark(byte, place)
                if (name := place.name_before(byte)) is not None and (is_mark or place.mark):
                    for spacing in learns:
                        spacing.saw(name, place.depth_before(byte), place.space)
                self._consume(self._vocab.first + byte)
                n += 1
                place = place.after(byte, is_mark)
            elif byte in _SPACES:
                place = replace(place, space=place.space + bytes((byte,)))
            else:
                self._own.llg_matcher_rollback(self._matcher, n)
                return None
        return place, n

    def _forced(self, place: _Place) -> Iterator[_Part]:
        """The bytes and special tokens that must come next, with whitespace between. llguidance consumes them."""
        found = (ctypes.c_uint32 * _MOST_BYTES)()
        n = int(self._own.llg_matcher_compute_ff_tokens(self._matcher, found, _MOST_BYTES))
        for token in found[: max(n, 0)]:
            byte = token - self._vocab.first
            if byte < 0:
                self._consume(token)
                yield _Part(special=token)
                place = _Place(place.depth)
                continue
            is_mark = self._is_mark(byte, place)
            space, is_known = b"", True
            if (name := place.name_before(byte)) is not None and (is_mark or place.mark):
                depth = place.depth_before(byte)
                usual = self._spacing.at(name, depth)
                if usual is None:
                    usual, is_known = self._vocab.habits.at(name, depth), name[0] == "<"  # where there seldom is any
                if usual is not None and usual.startswith(place.space):
                    space = usual[len(place.space) :]
            self._consume(token)
            yield _Part(space + bytes((byte,)), is_spaced=bool(space), is_known=is_known)
            place = place.after(byte, is_mark)

    # Tokens

    def _tokens(self, parts: Sequence[_Part], last: int | None) -> Iterator[tuple[int, float]]:
        """The tokens of forced text after the token `last`."""
        begin = 0
        while begin < len(parts):
            if (special := parts[begin].special) is not None:
                yield special, _INSIDE
                begin, last = begin + 1, special
                continue
            end = next((i for i in range(begin, len(parts)) if parts[i].special is not None), len(parts))
            yield from self._text_tokens(parts[begin:end], last, is_end=end == len(parts))
            begin, last = end, None

    def _text_tokens(self, parts: Sequence[_Part], last: int | None, is_end: bool) -> Iterator[tuple[int, float]]:
        text = b"".join(part.text for part in parts)
        tokens = self._vocab.tokens_after(last, text)
        at, bounds = 0, list[tuple[int, _Part]]()
        for part in parts:
            bounds.append((at, part))
            at += len(part.text)
        at = 0
        for i, token in enumerate(tokens):
            end = at + len(self._vocab.vocab.piece(token))
            own = [part for start, part in bounds if start < end and start + len(part.text) > at]
            prob = _INSIDE
            if not all(part.is_known for part in own):
                prob = _UNKNOWN
            elif is_end and i == len(tokens) - 1:
                prob = _LAST
            elif any(part.is_spaced for part in own):
                prob = _SPACED
            yield token, prob
            at = end

    def close(self) -> None:
        """Free it. A second call does nothing."""
        if self._matcher is not None:
            self._own.llg_free_matcher(self._matcher)
        self._matcher = None


@dataclass(frozen=True, slots=True)
class _Part:
    """A forced byte and the whitespace before it, or a special token."""

    text: bytes = b""
    special: int | None = None
    is_spaced: bool = False
    """There is whitespace."""
    is_known: bool = True
    """Whether there is any is as in this output before."""

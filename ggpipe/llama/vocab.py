"""A model's vocabulary: text to tokens and back."""

from __future__ import annotations

import codecs
import ctypes
import functools
import os
import re
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ggpipe.config.model import ModelConfig
from ggpipe.config.sampling import MODEL_KEYS, SamplingConfig
from ggpipe.core.draft_messages import VocabOutline, Vocabularies
from ggpipe.errors import ModelError, Setting, UsageError
from ggpipe.llama.gguf import ModelFile
from ggpipe.llama.libllama import lib, logged_errors, start
from ggpipe.llama.params import model_params

_UNKNOWN, _CONTROL, _LSTRIP, _RSTRIP = 1, 8, 128, 256  # LLAMA_TOKEN_ATTR_*
_MOST_EXTRA_TOKENS = 128  # as llama.cpp: padding
_IN_CODE_POINTS = (2, 3, 6)  # LLAMA_VOCAB_TYPE_BPE, _WPM, _PLAMO2
_BEYOND_UNICODE = re.compile(rb"(?:\xf4[\x90-\xbf]|[\xf5-\xf7][\x80-\xbf])[\x80-\xbf]{2}")
_SENTENCEPIECE = 1
_FIRST_COMPARED = 5  # as llama.cpp: the first ones are named differently by converters


class Vocab:
    """A model's vocabulary, loaded without weights. Thread-safe."""

    def __init__(self, model_file: ModelFile | Path, config: ModelConfig) -> None:
        """Load the vocabulary. A path may be that of a file without weights. Raises ModelError if libllama cannot read
        it."""
        path = model_file if isinstance(model_file, Path) else model_file.paths[0]
        start(config.numa)
        keep: list[object] = []
        params = model_params(config, keep)
        params.vocab_only = True
        logged_errors()
        self._model: Any = lib.llama_model_load_from_file(os.fsencode(path), params)
        if not self._model:
            raise ModelError(f"cannot read the vocabulary of {path}: {'; '.join(logged_errors()[:1])}")
        self.pointer = lib.llama_model_get_vocab(self._model)
        self.kind = int(lib.llama_vocab_type(self.pointer))
        """libllama's number of the tokenizer's kind."""
        if self.kind == 0:
            self.close()
            raise ModelError(f"{path} has no vocabulary: it cannot continue text")
        self.n_tokens = int(lib.llama_vocab_n_tokens(self.pointer))
        self.end_tokens = tuple(t for t in range(self.n_tokens) if lib.llama_vocab_is_eog(self.pointer, t))
        """Tokens that end generation."""
        n = ctypes.c_int32()
        suppressed = lib.llama_vocab_get_suppress_tokens(self.pointer, ctypes.byref(n))
        self.suppressed_tokens = tuple(int(suppressed[i]) for i in range(n.value))
        """Tokens that must never be sampled, according to the model's metadata."""
        self._tokens_with: dict[tuple[str, ...], tuple[int, ...]] = {}

    def tokenize(self, text: str) -> tuple[int, ...]:
        """A prompt's tokens, as llama.cpp makes them: BOS as the model wants it, special tokens parsed.

        Raises UsageError for text that this vocabulary has no tokens for.
        """
        return self._tokens(text, whole=True)

    def tokenize_pieces(self, pieces: Sequence[tuple[str, bool]]) -> tuple[int, ...]:
        """Tokenize a prompt given as pieces (text, is_literal). A literal piece contains no special tokens. BOS is not
        added if the prompt begins with it. Raises UsageError as `tokenize` does."""
        bos = -1 if self.added_bos is None else self.added_bos
        if not any(is_literal for _, is_literal in pieces):
            text = "".join(text for text, _ in pieces)
            return self.tokenize(text.removeprefix(self.text(bos)) if bos >= 0 else text)
        parts: list[str | int] = [""]  # plain text, and special tokens between
        special = re.compile("(" + "|".join(re.escape(text) for text in self.special_tokens) + ")")
        for text, is_literal in pieces:
            for i, part in enumerate([text] if is_literal or not self.special_tokens else special.split(text)):
                if i % 2:
                    parts += [self.special_tokens[part], ""]
                else:
                    parts[-1] = f"{parts[-1]}{part}"
        tokens: list[int] = []
        for i, found in enumerate(parts):
            if isinstance(found, int):
                tokens.append(found)
                continue
            before, after = (parts[j] if 0 <= j < len(parts) else None for j in (i - 1, i + 1))
            found = found.lstrip() if isinstance(before, int) and self._attributes(before) & _RSTRIP else found
            found = found.rstrip() if isinstance(after, int) and self._attributes(after) & _LSTRIP else found
            tokens += self._tokens(found, whole=False)
        if bos >= 0 and tokens[:1] != [bos]:
            tokens.insert(0, bos)
        if lib.llama_vocab_get_add_eos(self.pointer):
            tokens.append(lib.llama_vocab_eos(self.pointer))
        return tuple(tokens)

    def inner_tokens(self, text: str) -> tuple[int, ...]:
        """The tokens of text in the middle of an output, without special tokens. Raises UsageError as `tokenize`
        does."""
        if self.kind != _SENTENCEPIECE:
            return self._tokens(text, whole=False)
        return self._tokens("\n" + text, whole=False)[len(self._tokens("\n", whole=False)) :]  # no space goes before it

    def marks(self, text: str) -> tuple[int, ...]:
        """The tokens of a part of a prompt, with special tokens parsed. Raises UsageError as `tokenize` does."""
        return self._tokens(text, whole=False, parses=True)

    def _tokens(self, text: str, whole: bool, parses: bool | None = None) -> tuple[int, ...]:
        """`whole`: with what is added to a prompt. `parses` special tokens; None: where it is whole."""
        parses = whole if parses is None else parses
        data = text.encode("utf-8", "surrogateescape")
        if self.kind in _IN_CODE_POINTS:  # libllama reads other bytes that are no UTF-8 like this, and aborts on these
            data = _BEYOND_UNICODE.sub("\ufffd".encode() * 4, data)
        size = len(data) + 16
        while True:
            tokens = (ctypes.c_int32 * size)()
            n = lib.llama_tokenize(self.pointer, data, len(data), tokens, size, whole, parses)
            if n >= 0:
                return tuple(tokens[:n])
            if n == -(2**31) or -n <= size:
                raise UsageError("this model's vocabulary cannot tokenize the prompt")
            size = -n

    def pieces(self) -> list[bytes]:
        """The text of every token as bytes, including special tokens. Takes half a second for 150,000 tokens."""
        size = 256
        buffer = ctypes.create_string_buffer(size)
        found = []
        for token in range(self.n_tokens):
            n = lib.llama_token_to_piece(self.pointer, token, buffer, size, 0, True)
            found.append(buffer.raw[:n] if n >= 0 else self.piece(token, special=True))
        return found

    def tokens_with(self, strings: tuple[str, ...]) -> tuple[int, ...]:
        """The tokens that contain one of these strings. Takes as long as `pieces` at first, and nothing later."""
        found = self._tokens_with.get(strings)
        if found is None:
            wanted = [text.encode("utf-8", "surrogateescape") for text in strings]
            pieces = enumerate(self.pieces())
            found = tuple(id for id, piece in pieces if any(one in piece for one in wanted))
            self._tokens_with = {strings: found}
        return found

    def piece(self, token: int, special: bool = False) -> bytes:
        """A token's text, which may be part of a UTF-8 character. `special`: return the text of special tokens too."""
        size = 64
        while True:
            buffer = ctypes.create_string_buffer(size)
            n = lib.llama_token_to_piece(self.pointer, token, buffer, size, 0, special)
            if n >= 0:
                return buffer.raw[:n]
            size = -n

    def text(self, token: int) -> str:
        """The name of a token, including special tokens; empty for an id that does not exist."""
        if not 0 <= token < self.n_tokens:
            return ""
        return (lib.llama_vocab_get_text(self.pointer, token) or b"").decode("utf-8", "replace")

    @property
    def bos(self) -> int:
        """The beginning-of-sequence token; negative if there is none."""
        return int(lib.llama_vocab_bos(self.pointer))

    @property
    def added_bos(self) -> int | None:
        """The token that tokenizing puts before a prompt; None: it adds none."""
        return self.bos if lib.llama_vocab_get_add_bos(self.pointer) else None

    @property
    def turn_end(self) -> int:
        """The token that ends an answer; negative if there is none."""
        token = int(lib.llama_vocab_eot(self.pointer))
        return token if token >= 0 else int(lib.llama_vocab_eos(self.pointer))

    @property
    def bos_text(self) -> str:
        """The name of the beginning-of-sequence token; empty if there is none."""
        return self.text(lib.llama_vocab_bos(self.pointer))

    @property
    def eos_text(self) -> str:
        """The name of the end-of-sequence token; empty if there is none."""
        return self.text(lib.llama_vocab_eos(self.pointer))

    def sampling(self) -> SamplingConfig:
        """The model's recommended sampling settings, with llama.cpp's defaults for the others."""
        found: dict[str, str] = {}
        for key in MODEL_KEYS:
            value = ctypes.create_string_buffer(512)
            if lib.llama_model_meta_val_str(self._model, key.encode(), value, len(value)) > 0:
                found[key] = value.value.decode("utf-8", "replace")
        return SamplingConfig.of_model(found)

    def template(self, name: str | None = None) -> str | None:
        """The model's default chat template, or the one with this name (`tool_use`); None if there is none."""
        found = lib.llama_model_chat_template(self._model, name.encode() if name is not None else None)
        return found.decode("utf-8", "replace") if found else None

    @property
    def special_texts(self) -> Sequence[str]:
        """Names of the tokens that only templates may write, the longest first."""
        return tuple(self.special_tokens)

    @functools.cached_property
    def special_tokens(self) -> dict[str, int]:
        """Ids of the tokens that only templates may write, and that have no text when generated, by name. The longest
        names come first."""
        special = _CONTROL | _UNKNOWN
        tokens = [token for token in range(self.n_tokens) if self._attributes(token) & special and self.text(token)]
        return {self.text(token): token for token in sorted(tokens, key=lambda token: -len(self.text(token)))}

    def _attributes(self, token: int) -> int:
        return int(lib.llama_vocab_get_attr(self.pointer, token))

    @property
    def rolls_back(self) -> bool:
        """Whether the model's memory can remove the end of a sequence, unlike that of recurrent and hybrid models."""
        return not (lib.llama_model_is_recurrent(self._model) or lib.llama_model_is_hybrid(self._model))

    def outline(self) -> VocabOutline:
        """The properties by which this vocabulary is compared with another one."""
        vocab = self.pointer
        adds_eos = lib.llama_vocab_get_add_eos(vocab)
        return VocabOutline(
            kind=self.kind,
            added_bos=self.added_bos,
            added_eos=int(lib.llama_vocab_eos(vocab)) if adds_eos else None,
            eos=int(lib.llama_vocab_eos(vocab)),
            checksums=tuple(zlib.crc32(lib.llama_vocab_get_text(vocab, t) or b"") for t in range(self.n_tokens)),
            rolls_back=self.rolls_back,
        )

    def with_draft(self, outline: VocabOutline, file: str = "") -> Vocabularies:
        """This target's vocabulary beside a draft's. `file`: of the draft, where messages are to tell several apart.

        Raises ModelError where they do not name the same tokens.
        """
        found = self.compared_with(outline)
        if isinstance(found, Vocabularies):
            return found
        name = f" {file}" if file else ""
        raise ModelError(
            Setting("draft.model"),
            f"{name} does not fit ",
            Setting("model"),
            f": {found}; use a draft model of the same family",
        )

    def compared_with(self, outline: VocabOutline) -> Vocabularies | str:
        """This target's vocabulary and a draft's, or why they do not name the same tokens."""
        own = self.outline()
        n_own, n_other = len(own.checksums), len(outline.checksums)
        if own.kind != outline.kind:
            return "their tokenizers are of different kinds"
        if abs(n_own - n_other) > _MOST_EXTRA_TOKENS:
            return f"the target has {n_own} tokens, the draft {n_other}; at most {_MOST_EXTRA_TOKENS} may be extra"
        if own.added_bos != outline.added_bos:
            return f"to a text the target adds {_added(own.added_bos)} as BOS, the draft {_added(outline.added_bos)}"
        if own.added_eos != outline.added_eos:
            return f"to a text the target adds {_added(own.added_eos)} as EOS, the draft {_added(outline.added_eos)}"
        pairs = enumerate(zip(own.checksums, outline.checksums, strict=False))
        wrong = next((token for token, (a, b) in pairs if token >= _FIRST_COMPARED and a != b), None)
        if wrong is None:
            return Vocabularies(n_own, n_other, max(outline.eos, 0))
        return f"token {wrong} is {self.text(wrong)!r} in the target and another text in the draft"

    def close(self) -> None:
        """Free it. A second call does nothing."""
        if self._model:
            lib.llama_model_free(self._model)
        self._model = None


def _added(token: int | None) -> str:
    return "nothing" if token is None else f"token {token}"


class TextDecoder:
    """Turns tokens into text as they arrive, up to a stop string. A possible beginning of a stop string is held back,
    and so is an incomplete character."""

    def __init__(self, vocab: Vocab, stops: Sequence[str] = ()) -> None:
        self._vocab = vocab
        self._stops = stops
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._waiting = ""
        self.is_stopped = False
        """A stop string was found. The output ends before it."""

    def push(self, token: int) -> str:
        """Add a token. Returns the text that is certain by now."""
        text = self._waiting + self._utf8.decode(self._vocab.piece(token))
        found = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.is_stopped, self._waiting = True, ""
            return text[: min(found)]
        n = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._waiting = text[len(text) - n :]
        return text[: len(text) - n]

    def finish(self) -> str:
        """The text that was held back, at the end of the output. An incomplete character becomes U+FFFD."""
        return "" if self.is_stopped else self._waiting + self._utf8.decode(b"", final=True)


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of `text` are the beginning of `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)

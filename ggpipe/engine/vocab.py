"""A model's vocabulary: text to tokens and back."""

from __future__ import annotations

import codecs
import ctypes
import os
import zlib
from typing import Any

from ggpipe.config import ModelConfig
from ggpipe.engine.libllama import lib, logged_errors, start
from ggpipe.engine.model_file import ModelFile
from ggpipe.engine.model_params import model_params
from ggpipe.errors import ModelError, UsageError

_MOST_EXTRA_TOKENS = 128  # as llama.cpp: padding
_FIRST_COMPARED = 5  # as llama.cpp: the first ones are named differently by converters


class Vocab:
    """The vocabulary alone: no weights are read. Safe to use from several threads."""

    def __init__(self, model_file: ModelFile, config: ModelConfig) -> None:
        """Raises ModelError when libllama cannot read the vocabulary."""
        start(config.numa)
        keep: list[object] = []
        params = model_params(config, keep)
        params.vocab_only = True
        logged_errors()
        self._model: Any = lib.llama_model_load_from_file(os.fsencode(model_file.paths[0]), params)
        if not self._model:
            raise ModelError(f"cannot read the vocabulary of {model_file.paths[0]}: {'; '.join(logged_errors()[:1])}")
        self.pointer = lib.llama_model_get_vocab(self._model)
        if lib.llama_vocab_type(self.pointer) == 0:
            self.close()
            raise ModelError(f"{model_file.paths[0]} has no vocabulary: it cannot continue text")
        self.n_tokens = int(lib.llama_vocab_n_tokens(self.pointer))
        self.end_tokens = tuple(t for t in range(self.n_tokens) if lib.llama_vocab_is_eog(self.pointer, t))
        """Tokens that end a text."""
        n = ctypes.c_int32()
        suppressed = lib.llama_vocab_get_suppress_tokens(self.pointer, ctypes.byref(n))
        self.suppressed_tokens = tuple(int(suppressed[i]) for i in range(n.value))
        """Tokens that the model's file says must never be drawn."""

    def tokenize(self, text: str) -> tuple[int, ...]:
        """A prompt's tokens, as llama.cpp makes them: BOS as the model wants it, special tokens parsed.

        Raises UsageError for text that this vocabulary has no tokens for.
        """
        data = text.encode("utf-8", "surrogateescape")
        size = len(data) + 16
        while True:
            tokens = (ctypes.c_int32 * size)()
            n = lib.llama_tokenize(self.pointer, data, len(data), tokens, size, True, True)
            if n >= 0:
                return tuple(tokens[:n])
            if n == -(2**31) or -n <= size:
                raise UsageError("this model's vocabulary cannot tokenize the prompt")
            size = -n

    def piece(self, token: int) -> bytes:
        """A token's text, which may be part of a UTF-8 character; special tokens have none."""
        size = 64
        while True:
            buffer = ctypes.create_string_buffer(size)
            n = lib.llama_token_to_piece(self.pointer, token, buffer, size, 0, False)
            if n >= 0:
                return buffer.raw[:n]
            size = -n

    @property
    def rolls_back(self) -> bool:
        """The model's memory can forget the end of a sequence; recurrent and hybrid models' cannot."""
        return not (lib.llama_model_is_recurrent(self._model) or lib.llama_model_is_hybrid(self._model))

    def outline(self) -> dict[str, Any]:
        """What a draft's vocabulary is compared by, fit for JSON: sizes, special tokens, a checksum of each text."""
        vocab = self.pointer
        return {
            "type": int(lib.llama_vocab_type(vocab)),
            "special": {
                "BOS": int(lib.llama_vocab_bos(vocab)),
                "EOS": int(lib.llama_vocab_eos(vocab)),
                "add BOS": bool(lib.llama_vocab_get_add_bos(vocab)),
                "add EOS": bool(lib.llama_vocab_get_add_eos(vocab)),
            },
            "texts": [zlib.crc32(lib.llama_vocab_get_text(vocab, token) or b"") for token in range(self.n_tokens)],
            "rolls_back": self.rolls_back,
        }

    def check_draft(self, outline: dict[str, Any]) -> None:
        """Does a draft's vocabulary, as `outline` tells it, name the same tokens? Raises ModelError where not."""
        own = self.outline()
        n_own, n_other = len(own["texts"]), len(outline["texts"])
        if own["type"] != outline["type"]:
            why = "their tokenizers are of different kinds"
        elif abs(n_own - n_other) > _MOST_EXTRA_TOKENS:
            why = f"the target has {n_own} tokens, the draft {n_other}; at most {_MOST_EXTRA_TOKENS} may be extra"
        elif differ := [name for name, value in own["special"].items() if outline["special"][name] != value]:
            name = differ[0]
            why = f"{name} is {own['special'][name]} in the target, {outline['special'][name]} in the draft"
        else:
            pairs = enumerate(zip(own["texts"], outline["texts"], strict=False))
            wrong = next((token for token, (a, b) in pairs if token >= _FIRST_COMPARED and a != b), None)
            if wrong is None:
                return
            text = (lib.llama_vocab_get_text(self.pointer, wrong) or b"").decode("utf-8", "replace")
            why = f"token {wrong} is {text!r} in the target and another text in the draft"
        raise ModelError(f"-md does not fit -m: {why}; use a draft model of the same family")

    def close(self) -> None:
        """Free it. A second call does nothing."""
        if self._model:
            lib.llama_model_free(self._model)
        self._model = None


class TextDecoder:
    """Turns tokens into text as they come; a character cut by a token border waits for its rest."""

    def __init__(self, vocab: Vocab) -> None:
        self._vocab = vocab
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """The text that is whole now."""
        return self._utf8.decode(self._vocab.piece(token))

    def finish(self) -> str:
        """What is left: a replacement character when the text ends inside a character."""
        return self._utf8.decode(b"", final=True)

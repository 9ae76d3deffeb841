"""Loads llguidance and declares what we use of its C interface.

Its Python module holds the interpreter's lock while it reads a vocabulary, for a second with 150,000 tokens. Functions
called through ctypes do not, so the head continues meanwhile. Structures are those of `llguidance.h`, version 1.9.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Collection, Sequence
from ctypes import POINTER, c_bool, c_char_p, c_int32, c_size_t, c_uint32, c_uint64, c_void_p
from typing import Any, ClassVar

import numpy as np

from ggpipe.errors import RunError

_VERSION = "llguidance@1."
_MESSAGE_BYTES = 512


class TokenizerInit(ctypes.Structure):
    """LlgTokenizerInitV2."""

    _fields_: ClassVar = [
        ("struct_size", c_size_t),
        ("vocab_size", c_uint32),
        ("tok_eos", c_uint32),
        ("token_lens", c_void_p),
        ("token_bytes", c_char_p),
        ("tokenizer_json", c_char_p),
        ("tokenize_assumes_string", c_bool),
        ("tokenize_fn", c_void_p),
        ("use_approximate_greedy_tokenize_fn", c_bool),
        ("tokenize_user_data", c_void_p),
        ("slices", c_void_p),
        ("tok_eos_extra", POINTER(c_uint32)),
        ("tok_eos_extra_count", c_uint32),
    ]


class _Limits(ctypes.Structure):
    """LlgParserLimits."""

    _fields_: ClassVar = [
        ("max_items_in_row", c_size_t),
        ("initial_lexer_fuel", c_uint64),
        ("step_lexer_fuel", c_uint64),
        ("step_max_items", c_size_t),
        ("max_lexer_states", c_size_t),
        ("max_grammar_size", c_size_t),
        ("precompute_large_lexemes", c_bool),
        ("verbose_errors", c_bool),
    ]


class MatcherInit(ctypes.Structure):
    """LlgConstraintInit."""

    _fields_: ClassVar = [
        ("tokenizer", c_void_p),
        ("log_buffer_level", c_uint32),
        ("log_stderr_level", c_uint32),
        ("ff_tokens_ok", c_bool),
        ("backtrack_ok", c_bool),
        ("limits", _Limits),
    ]


TokenizeFunction = ctypes.CFUNCTYPE(c_size_t, c_void_p, c_void_p, c_size_t, POINTER(c_uint32), c_size_t)
"""LlgTokenizeFn: user data, text, its bytes, where tokens go, how many fit; returns how many there are."""

_FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "llg_new_tokenizer_v2": (c_void_p, [POINTER(TokenizerInit), c_char_p, c_size_t]),
    "llg_free_tokenizer": (None, [c_void_p]),
    "llg_constraint_init_set_defaults": (None, [POINTER(MatcherInit), c_void_p]),
    "llg_new_matcher": (c_void_p, [POINTER(MatcherInit), c_char_p, c_char_p]),
    "llg_clone_matcher": (c_void_p, [c_void_p]),
    "llg_free_matcher": (None, [c_void_p]),
    "llg_matcher_get_error": (c_char_p, [c_void_p]),
    "llg_matcher_consume_token": (c_int32, [c_void_p, c_uint32]),
    "llg_matcher_rollback": (c_int32, [c_void_p, c_size_t]),
    "llg_matcher_compute_ff_tokens": (c_int32, [c_void_p, POINTER(c_uint32), c_size_t]),
    "llg_matcher_validate_tokens": (c_int32, [c_void_p, POINTER(c_uint32), c_size_t]),
    "llg_matcher_get_mask_byte_size": (c_size_t, [c_void_p]),
    "llg_matcher_compute_mask_into": (c_int32, [c_void_p, c_void_p, c_size_t]),
}


@functools.cache
def library() -> Any:
    """llguidance's functions. Raises RunError if it is another version."""
    from llguidance import _lib

    found = ctypes.CDLL(_lib.__file__)
    try:
        found.llg_get_version.restype = c_char_p
        version = found.llg_get_version().decode()
        for name, (result, arguments) in _FUNCTIONS.items():
            function = getattr(found, name)
            function.restype, function.argtypes = result, arguments
    except AttributeError as e:
        raise RunError("the installed llguidance has no C interface: install version 1.9") from e
    if not version.startswith(_VERSION):
        raise RunError(f"{version} is installed: install llguidance 1.9")
    return found


def new_tokenizer(pieces: Sequence[bytes], ends: Collection[int], tokenize: Any = None) -> int:
    """Make a tokenizer for a vocabulary of these pieces of text, indexed by token. `ends`: tokens that end the output.
    `tokenize`: a `TokenizeFunction`, which the caller keeps as long as the tokenizer; None splits text greedily.

    Takes a second for 150,000 tokens. Raises RunError if llguidance cannot use the vocabulary.
    """
    lengths, in_order = np.array([len(piece) for piece in pieces], np.uint32), sorted(ends)
    init = TokenizerInit(
        struct_size=ctypes.sizeof(TokenizerInit),
        vocab_size=len(pieces),
        tok_eos=in_order[0] if in_order else 2**32 - 1,
        token_lens=lengths.ctypes.data,
        token_bytes=b"".join(pieces),
        tokenize_fn=ctypes.cast(tokenize, c_void_p) if tokenize is not None else None,
        use_approximate_greedy_tokenize_fn=tokenize is None,
        tok_eos_extra=(c_uint32 * len(in_order))(*in_order),
        tok_eos_extra_count=len(in_order),
    )
    message = ctypes.create_string_buffer(_MESSAGE_BYTES)
    found: int | None = library().llg_new_tokenizer_v2(ctypes.byref(init), message, len(message))
    if not found:
        raise RunError(f"llguidance cannot use the model's vocabulary: {message.value.decode(errors='replace')}")
    return found


def new_matcher(tokenizer: int, lark: str) -> int:
    """Make a matcher for a grammar, in its first state. `llg_matcher_get_error` tells whether it can be followed."""
    own, init = library(), MatcherInit()
    own.llg_constraint_init_set_defaults(ctypes.byref(init), tokenizer)
    init.log_buffer_level = init.log_stderr_level = 0
    init.limits.verbose_errors = False
    found: int = own.llg_new_matcher(ctypes.byref(init), b"lark", lark.encode())
    return found

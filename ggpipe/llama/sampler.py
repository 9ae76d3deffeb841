"""llama.cpp's sampler chain, which gets the logits that the last rank sends instead of whole rows."""

from __future__ import annotations

import collections
import ctypes
import math
import secrets
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from ggpipe.config.sampling import SamplingConfig
from ggpipe.core.draft_messages import Adjustments, Drawing, Dry, Penalties
from ggpipe.core.messages import LogitsKind, LogitsRequest, RowLogits
from ggpipe.errors import SettingError
from ggpipe.llama.libllama import lib
from ggpipe.llama.vocab import Vocab
from ggpipe.text.chat.reasoning_budget import ReasoningBudget

_CANDIDATE = np.dtype([("id", "<i4"), ("logit", "<f4"), ("p", "<f4")])  # llama_token_data
_MOST_BIAS = 1e9  # beyond it a bias decides alone; 32-bit logits have no room for the largest ones
_LEAST_FOR_SUM = 2  # the best token alone comes without the log-sum-exp
_MIROSTAT_M = 100  # as llama.cpp: tokens from which version 1 estimates how probabilities fall


class Sampler:
    """Samples one request's tokens as llama.cpp's `common_sampler` does."""

    def __init__(self, config: SamplingConfig, vocab: Vocab, n_ctx: int) -> None:
        """Make the chain. Raises SettingError for a bias of a token that the model does not have."""
        self._config = config
        self._n_vocab = vocab.n_tokens
        self._biases: dict[int, float] = {}
        for token, bias in config.logit_bias:
            if token >= vocab.n_tokens:
                raise SettingError(
                    "logit_bias", f"names token {token}: the model has tokens up to {vocab.n_tokens - 1}"
                )
            self._biases[token] = self._biases.get(token, 0.0) + bias
        never = {token for token, bias in self._biases.items() if bias == -math.inf}
        never.update(vocab.suppressed_tokens, vocab.end_tokens if config.ignore_eos else ())
        self.banned = tuple(sorted(never))
        """Tokens that are never sampled."""
        self._biases = {
            token: max(min(bias, _MOST_BIAS), -_MOST_BIAS)
            for token, bias in self._biases.items()
            if token not in never and bias
        }
        self._raised = tuple(token for token, bias in self._biases.items() if bias > 0)
        self.probs: tuple[tuple[int, float], ...] = ()
        """(token, log-probability) of the sampled token, then of the most likely ones; empty without `n_probs`."""
        self._shows_model = config.n_probs > 0 and not config.post_sampling_probs
        self._budget: ReasoningBudget | None = None
        if self._shows_model:  # it bans nothing, so the last rank does not either
            self._biases |= dict.fromkeys(never, -math.inf)
        self.seed = config.seed if config.seed >= 0 else secrets.randbelow(2**32 - 1)
        windows = {"penalties": config.repeat_last_n, "dry": config.dry_penalty_last_n}
        windows = {name: n_ctx if n < 0 else min(n, n_ctx) for name, n in windows.items()}
        self._vocab, self._windows = vocab, windows
        n_seen = max((windows[name] for name in config.active_samplers if name in windows), default=0)
        self._window: collections.deque[int] = collections.deque(maxlen=n_seen)
        self._chain: Any = None
        if not config.greedy or config.penalizes:
            self._chain = lib.llama_sampler_chain_init(lib.llama_sampler_chain_default_params())
            self._draw = _drawing(config, vocab, self.seed)
            for sampler in (*_filters(config, vocab, windows, self.seed), self._draw):
                lib.llama_sampler_chain_add(self._chain, sampler)
        self._logits_request = None if n_seen else self._wanted()

    @property
    def drawing(self) -> Drawing | None:
        """How tokens are drawn, for drafters. None where the best one is taken, or more than one number decides."""
        config = self._config
        if self._chain is None or config.greedy or config.mirostat or config.temp <= 0:
            return None
        values = {
            "top_k": config.top_k, "top_p": config.top_p, "min_p": config.min_p, "temperature": config.temp
        }  # fmt: skip
        if not {"adaptive_p", "typ_p", "infill"}.isdisjoint(config.active_samplers):
            return None
        known = tuple((name, float(values[name])) for name in config.active_samplers if name in values)
        return Drawing(seed=self.seed, samplers=known)

    @property
    def adjustments(self) -> Adjustments | None:
        """How logits are adjusted before a token is chosen, for drafters. None: not at all."""
        biases = tuple((token, bias) for token, bias in self._biases.items() if bias > -math.inf)
        penalties, dry = _penalties(self._config, self._vocab, self._windows)
        if not biases and penalties is None and dry is None:
            return None
        return Adjustments(biases=biases, penalties=penalties, dry=dry)

    def logits_request(self) -> LogitsRequest:
        """The logits that sampling the next token needs.

        The k best tokens after penalties and biases are among the best k + (number of tokens that these may lower)
        before them, and the tokens that biases raise.
        """
        return self._logits_request or self._wanted()

    def _wanted(self) -> LogitsRequest:
        n, banned = self._n_vocab, () if self._shows_model else self.banned
        if self._config.n_best is not None:
            n = self._config.n_best + len(self._biases) - len(self._raised) + len(set(self._window))
        if self._shows_model:
            is_limited = self._config.reasoning_marks is not None  # a token that is written may be any
            n = self._n_vocab if is_limited else max(n, self._config.n_probs, _LEAST_FOR_SUM)
        if n + len(banned) >= self._n_vocab:
            return self._selection() or LogitsRequest(LogitsKind.FULL, banned=banned)
        return LogitsRequest(LogitsKind.TOP, n, banned, sums=self._shows_model, also=self._raised)

    def _selection(self) -> LogitsRequest | None:
        """What the last rank can do of the sampling, which then needs few tokens of the row; None: nothing."""
        config, active = self._config, self._config.active_samplers
        if self.drawing is None or self._biases or config.n_probs:
            return None
        if active[:1] == ("min_p",) and config.min_keep <= 1:
            return LogitsRequest(LogitsKind.LIKELY, banned=self.banned, sums=False, min_p=config.min_p)
        if set(active) <= {"temperature"} and config.dynatemp_range <= 0:
            return LogitsRequest(LogitsKind.DRAWN, banned=self.banned, sums=False, temp=config.temp if active else 1.0)
        return None

    @property
    def logits_request_grows(self) -> bool:
        """Whether `logits_request` may need one more of the best logits with each further token of the output."""
        return bool(self._window.maxlen)

    def sample(self, row: RowLogits, of_model: RowLogits | None = None) -> int:
        """Sample from the row that `logits_request` asked for. `of_model`: the row before a grammar removed tokens."""
        token = self._sample(row)
        if self._shows_model:
            self.probs = _model_probs(of_model or row, token, self._config.n_probs)
        return token

    def _sample(self, row: RowLogits) -> int:
        ids, logits = row.ids, np.asarray(row.logits, np.float32)
        if self._biases:
            logits = self._biased(ids, logits)
        if written := self.written:
            ids, logits = _alone(written[0], ids, logits)
        if self._chain is None:
            best = int(logits.argmax())
            token = best if ids is None else ids[best]
            if self._config.n_probs:
                self.probs = ((token, 0.0),) * 2
            return token
        candidates = np.zeros(len(logits), _CANDIDATE)
        candidates["id"] = np.arange(len(logits)) if ids is None else ids
        candidates["logit"] = logits
        array = lib.llama_token_data_array(
            ctypes.cast(candidates.ctypes.data, ctypes.POINTER(lib.llama_token_data)), len(logits), -1, False
        )
        lib.llama_sampler_apply(self._chain, ctypes.byref(array))
        token = int(array.data[array.selected].id)
        if self._config.n_probs and not self._shows_model:
            left = (ctypes.addressof(array.data[0]) - candidates.ctypes.data) // _CANDIDATE.itemsize
            self.probs = _draws_probs(candidates[left : left + array.size], array.selected, self._config.n_probs)
        return token

    def _biased(self, ids: tuple[int, ...] | None, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        logits = logits.copy()
        if ids is None:
            logits[list(self._biases)] += np.fromiter(self._biases.values(), np.float32)
        else:
            logits += np.fromiter((self._biases.get(id, 0.0) for id in ids), np.float32)
        return logits

    def begin(self, prompt: Iterable[int], vocab: Vocab) -> None:
        """Start an output after this prompt, whose tokens count for penalties."""
        self.accept(prompt)
        if (marks := self._config.reasoning_marks) is None or self._config.reasoning_budget < 0:
            return
        ends = [vocab.marks(end) for end in marks.ends]
        self._budget = ReasoningBudget(
            [vocab.marks(begin) for begin in marks.begins],
            ends,
            vocab.marks(self._config.reasoning_budget_message) + (ends[0] if ends else ()),
            self._config.reasoning_budget,
            marks.is_open,
            vocab.piece,
        )

    @property
    def written(self) -> tuple[int, ...]:
        """The next tokens if they are forced: the end of a reasoning whose budget is spent. Otherwise empty."""
        return self._budget.written if self._budget is not None else ()

    def write_nothing(self) -> None:
        """Stop forcing tokens, because a grammar does not allow the end of the reasoning."""
        self._budget = None

    def accept(self, tokens: Iterable[int]) -> None:
        """Add tokens to those that penalties apply to."""
        for token in tokens:
            if self._budget is not None:
                self._budget.accept(token)
            self._window.append(token)
            if self._chain is not None:
                lib.llama_sampler_accept(self._chain, token)

    def resume(self, tokens: Iterable[int]) -> None:
        """Continue after tokens that another process sampled with the same seed, as if they had been sampled here.

        The chain's state depends only on the tokens and on the number of draws, since each draw takes one random number
        regardless of the logits. Samplers that remember logits (`SamplingConfig.remembers_rows`) need `replay`.
        """
        for token in tokens:
            self.skip(token)
            self.accept((token,))

    def skip(self, token: int) -> None:
        """Take the random number with which another process sampled this token."""
        if self._chain is not None:
            candidate = lib.llama_token_data(token, 0.0, 0.0)
            array = lib.llama_token_data_array(ctypes.pointer(candidate), 1, -1, False)
            lib.llama_sampler_apply(self._draw, ctypes.byref(array))

    def replay_logits_request(self, n: int) -> LogitsRequest:
        """The logits that replaying `n` tokens and sampling the next one need."""
        logits_request = self.logits_request()
        return (
            structs.replace(logits_request, n=logits_request.n + n)
            if self.logits_request_grows and logits_request.kind is LogitsKind.TOP
            else logits_request
        )

    def replay(self, row: RowLogits, token: int, _: bool = False) -> None:
        """Continue after one token that another process sampled from this row."""
        self._sample(row)
        self.accept((token,))

    def close(self) -> None:
        """Free the chain. A second call does nothing."""
        if self._chain is not None:
            lib.llama_sampler_free(self._chain)
        self._chain = None


def _alone(
    token: int, ids: tuple[int, ...] | None, logits: NDArray[np.float32]
) -> tuple[tuple[int, ...] | None, NDArray[np.float32]]:
    """The row with this token as the only one that can be sampled."""
    if ids is not None and token not in ids:
        ids = (*ids[:-1], token)
    found = np.full_like(logits, -np.inf)
    found[token if ids is None else ids.index(token)] = 0.0
    return ids, found


def _model_probs(row: RowLogits, token: int, n: int) -> tuple[tuple[int, float], ...]:
    """(token, log-probability) of a token, then of the `n` most likely ones, before samplers change them."""
    if row.ids is not None:
        found = [(id, logit - row.log_sum_exp) for id, logit in zip(row.ids, row.logits, strict=True)]
        return next(pair for pair in found if pair[0] == token), *found[:n]
    logits = np.asarray(row.logits, np.float64)
    logits -= np.logaddexp.reduce(logits)
    best = np.argpartition(-logits, min(n, len(logits) - 1))[:n]
    best = best[np.argsort(-logits[best], kind="stable")]
    return tuple((int(id), float(logits[id])) for id in (token, *best))


def _draws_probs(candidates: NDArray[Any], selected: int, n: int) -> tuple[tuple[int, float], ...]:
    """(token, log-probability) of the sampled token, then of the `n` most likely candidates."""
    best = np.argsort(-candidates["p"], kind="stable")[:n]
    pairs = ((int(candidates["id"][i]), float(candidates["p"][i])) for i in (selected, *best))
    return tuple((id, math.log(p)) for id, p in pairs if p > 0)


def _filters(config: SamplingConfig, vocab: Vocab, windows: Mapping[str, int], seed: int) -> Iterator[Any]:
    """The samplers before the one that selects a token, as in `common_sampler_init`."""
    if config.mirostat:
        yield lib.llama_sampler_init_temp(config.temp)
    for name in config.active_samplers:
        match name:
            case "penalties":
                yield lib.llama_sampler_init_penalties(
                    vocab.n_tokens,
                    windows[name],
                    config.repeat_penalty,
                    config.frequency_penalty,
                    config.presence_penalty,
                )
            case "dry":
                breakers = [text.encode("utf-8", "surrogateescape") for text in config.dry_sequence_breakers]
                yield lib.llama_sampler_init_dry(
                    vocab.pointer,
                    config.dry_multiplier,
                    config.dry_base,
                    config.dry_allowed_length,
                    windows[name],
                    (ctypes.c_char_p * len(breakers))(*breakers),
                    len(breakers),
                )
            case "top_n_sigma":
                yield lib.llama_sampler_init_top_n_sigma(config.top_n_sigma)
            case "top_k":
                yield lib.llama_sampler_init_top_k(config.top_k)
            case "typ_p":
                yield lib.llama_sampler_init_typical(config.typical_p, config.min_keep)
            case "top_p":
                yield lib.llama_sampler_init_top_p(config.top_p, config.min_keep)
            case "min_p":
                yield lib.llama_sampler_init_min_p(config.min_p, config.min_keep)
            case "xtc":
                yield lib.llama_sampler_init_xtc(config.xtc_probability, config.xtc_threshold, config.min_keep, seed)
            case "temperature":
                yield lib.llama_sampler_init_temp_ext(config.temp, config.dynatemp_range, config.dynatemp_exponent)
            case "infill":
                yield lib.llama_sampler_init_infill(vocab.pointer)


def _penalties(config: SamplingConfig, vocab: Vocab, windows: Mapping[str, int]) -> tuple[Penalties | None, Dry | None]:
    penalties = dry = None
    if "penalties" in config.active_samplers and windows["penalties"]:
        penalties = Penalties(
            n_last=windows["penalties"],
            repeat=config.repeat_penalty,
            frequency=config.frequency_penalty,
            presence=config.presence_penalty,
        )
    if "dry" in config.active_samplers and windows["dry"]:
        dry = Dry(
            n_last=windows["dry"],
            multiplier=config.dry_multiplier,
            base=config.dry_base,
            allowed_length=config.dry_allowed_length,
            breakers=vocab.tokens_with(config.dry_sequence_breakers),
        )
    return penalties, dry


def _drawing(config: SamplingConfig, vocab: Vocab, seed: int) -> Any:
    """The last sampler of the chain, which selects a token."""
    match config.mirostat:
        case 1:
            tau, eta = config.mirostat_tau, config.mirostat_eta
            return lib.llama_sampler_init_mirostat(vocab.n_tokens, seed, tau, eta, _MIROSTAT_M)
        case 2:
            return lib.llama_sampler_init_mirostat_v2(seed, config.mirostat_tau, config.mirostat_eta)
    if "adaptive_p" in config.samplers:
        return lib.llama_sampler_init_adaptive_p(config.adaptive_target, config.adaptive_decay, seed)
    return lib.llama_sampler_init_dist(seed)

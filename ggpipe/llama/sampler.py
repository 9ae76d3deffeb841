"""llama.cpp's sampler chain, fed with what the last rank sends instead of whole rows of logits."""

from __future__ import annotations

import collections
import ctypes
import math
import secrets
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ggpipe.config.sampling import SamplingConfig
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
    """Draws one request's tokens as llama.cpp's `common_sampler` does."""

    def __init__(self, config: SamplingConfig, vocab: Vocab, n_ctx: int) -> None:
        """Raises UsageError for a bias of a token that the model does not have."""
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
        """Tokens that are never drawn."""
        self._biases = {
            token: max(min(bias, _MOST_BIAS), -_MOST_BIAS)
            for token, bias in self._biases.items()
            if token not in never and bias
        }
        self._raised = tuple(token for token, bias in self._biases.items() if bias > 0)
        self.probs: tuple[tuple[int, float], ...] = ()
        """The sampled token with its log-probability, and the best ones with theirs, where the config asks for them."""
        self._shows_model = config.n_probs > 0 and not config.post_sampling_probs
        self._budget: ReasoningBudget | None = None
        if self._shows_model:  # it bans nothing, so the last rank does not either
            self._biases |= dict.fromkeys(never, -math.inf)
        self.seed = config.seed if config.seed >= 0 else secrets.randbelow(2**32 - 1)
        windows = {"penalties": config.repeat_last_n, "dry": config.dry_penalty_last_n}
        windows = {name: n_ctx if n < 0 else min(n, n_ctx) for name, n in windows.items()}
        n_seen = max((windows[name] for name in config.active_samplers if name in windows), default=0)
        self._window: collections.deque[int] = collections.deque(maxlen=n_seen)
        self._logits_request = None if n_seen else self._wanted()
        self._chain: Any = None
        if not config.greedy or config.penalizes:
            self._chain = lib.llama_sampler_chain_init(lib.llama_sampler_chain_default_params())
            self._draw = _drawing(config, vocab, self.seed)
            for sampler in (*_filters(config, vocab, windows, self.seed), self._draw):
                lib.llama_sampler_chain_add(self._chain, sampler)

    def logits_request(self) -> LogitsRequest:
        """What drawing the next token takes.

        The best k are still among the best k + (tokens that penalties and biases may lower) and those that biases
        raise.
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
            return LogitsRequest(LogitsKind.FULL, banned=banned)
        return LogitsRequest(LogitsKind.TOP, n, banned, sums=self._shows_model, also=self._raised)

    @property
    def logits_request_grows(self) -> bool:
        """`logits_request` takes one more of the best logits for each further token of the text, at most."""
        return bool(self._window.maxlen)

    def sample(self, row: RowLogits, of_model: RowLogits | None = None) -> int:
        """Draw from a row that was asked for by `logits_request`. `of_model`: the row before tokens were left out."""
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
        """The tokens of the prompt: penalties look back on them. The text follows."""
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
        """The next tokens, where they are not drawn: the end of a reasoning whose budget is used up."""
        return self._budget.written if self._budget is not None else ()

    def write_nothing(self) -> None:
        """Have the next token drawn all the same: the end of the reasoning does not fit there."""
        self._budget = None

    def accept(self, tokens: Iterable[int]) -> None:
        """Drawn tokens: penalties look back on them."""
        for token in tokens:
            if self._budget is not None:
                self._budget.accept(token)
            self._window.append(token)
            if self._chain is not None:
                lib.llama_sampler_accept(self._chain, token)

    def resume(self, tokens: Iterable[int]) -> None:
        """Tokens that another process drew with the same seed: go on as if they were drawn here.

        What this chain remembers follows from the tokens and the number of draws. Each draw takes one random number,
        whatever the logits are. Samplers that remember more (`SamplingConfig.remembers_rows`) need `replay`.
        """
        for token in tokens:
            self.skip(token)
            self.accept((token,))

    def skip(self, token: int) -> None:
        """This token was drawn by another process."""
        if self._chain is not None:
            candidate = lib.llama_token_data(token, 0.0, 0.0)
            array = lib.llama_token_data_array(ctypes.pointer(candidate), 1, -1, False)
            lib.llama_sampler_apply(self._draw, ctypes.byref(array))

    def replay_logits_request(self, n: int) -> LogitsRequest:
        """What replaying the rows of `n` tokens takes, and drawing the next one."""
        logits_request = self.logits_request()
        return (
            replace(logits_request, n=logits_request.n + n)
            if self.logits_request_grows and logits_request.kind is LogitsKind.TOP
            else logits_request
        )

    def replay(self, row: RowLogits, token: int, _: bool = False) -> None:
        """As `resume`, for one token and the row that it was drawn from."""
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
    """A row of as many tokens, with this one as the only one that can be drawn."""
    if ids is not None and token not in ids:
        ids = (*ids[:-1], token)
    found = np.full_like(logits, -np.inf)
    found[token if ids is None else ids.index(token)] = 0.0
    return ids, found


def _model_probs(row: RowLogits, token: int, n: int) -> tuple[tuple[int, float], ...]:
    """The log-probabilities of a token and of the `n` best, before anything changes them."""
    if row.ids is not None:
        found = [(id, logit - row.log_sum_exp) for id, logit in zip(row.ids, row.logits, strict=True)]
        return next(pair for pair in found if pair[0] == token), *found[:n]
    logits = np.asarray(row.logits, np.float64)
    logits -= np.logaddexp.reduce(logits)
    best = np.argpartition(-logits, min(n, len(logits) - 1))[:n]
    best = best[np.argsort(-logits[best], kind="stable")]
    return tuple((int(id), float(logits[id])) for id in (token, *best))


def _draws_probs(candidates: NDArray[Any], selected: int, n: int) -> tuple[tuple[int, float], ...]:
    """The log-probabilities of the token that was drawn, and of the `n` best among those that could be."""
    best = np.argsort(-candidates["p"], kind="stable")[:n]
    pairs = ((int(candidates["id"][i]), float(candidates["p"][i])) for i in (selected, *best))
    return tuple((id, math.log(p)) for id, p in pairs if p > 0)


def _filters(config: SamplingConfig, vocab: Vocab, windows: Mapping[str, int], seed: int) -> Iterator[Any]:
    """The samplers in front of the draw, as `common_sampler_init` has them."""
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


def _drawing(config: SamplingConfig, vocab: Vocab, seed: int) -> Any:
    """The sampler that draws, at the end of the chain."""
    match config.mirostat:
        case 1:
            tau, eta = config.mirostat_tau, config.mirostat_eta
            return lib.llama_sampler_init_mirostat(vocab.n_tokens, seed, tau, eta, _MIROSTAT_M)
        case 2:
            return lib.llama_sampler_init_mirostat_v2(seed, config.mirostat_tau, config.mirostat_eta)
    if "adaptive_p" in config.samplers:
        return lib.llama_sampler_init_adaptive_p(config.adaptive_target, config.adaptive_decay, seed)
    return lib.llama_sampler_init_dist(seed)

"""A request that the engine serves: its sampler, its text so far, what is counted for it."""

from __future__ import annotations

import collections
import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from ggpipe.core.draft_messages import Drawing
from ggpipe.core.messages import LogitsKind, LogitsRequest, RowLogits
from ggpipe.core.request import Finish, Token, TokenProb
from ggpipe.core.request_spec import RequestSpec
from ggpipe.engine.prompt_reader import ReadPrompt
from ggpipe.llama.constrained_sampler import Drawn, sampler_at
from ggpipe.llama.grammar import Grammar
from ggpipe.llama.vocab import TextDecoder, Vocab
from ggpipe.stats.records import RequestStats
from ggpipe.text.embeddings import Pooled


@dataclass(frozen=True, kw_only=True)
class PreparingRequest:
    """A request whose grammar is being compiled."""

    spec: RequestSpec
    read: ReadPrompt
    stats: RequestStats


class ActiveRequest:
    """Belongs to the engine's thread."""

    def __init__(
        self,
        spec: RequestSpec,
        prompt: tuple[int, ...],
        vocab: Vocab,
        n_ctx: int,
        stats: RequestStats,
        grammar: Grammar | None = None,
    ) -> None:
        """`prompt`: its tokens. `stats` is filled in while the request is served. `grammar`: that of its sampling,
        which belongs to it from now on. Raises UsageError if the output so far does not fit the grammar."""
        self.stats = stats
        self.spec = spec
        self.sampler = sampler_at(prompt, spec.sampling, spec.resumed, spec.redrawn, vocab, n_ctx, grammar)
        self.decoder = TextDecoder(vocab, spec.sampling.stop)
        for token in spec.resumed:
            self.decoder.push(token)
        self.not_saved: list[str] = []
        """Why parts of its prompt cache are not written, a line each."""
        self.pooled = Pooled(spec.pooling or "last")
        """The embedding, if the request is for one."""
        self._vocab = vocab
        self._to_replay: collections.deque[tuple[int, bool]] = collections.deque()
        """Tokens of a resumed output whose rows the sampler has not seen yet, and whether they were drawn again."""
        self._sampled: collections.deque[Token] = collections.deque()
        """Tokens that are sampled and not given out yet."""
        self.n_draws = 1
        """Random numbers that the latest token took."""
        self._first_s = 0.0
        """When the first of them was sampled (monotonic)."""
        if spec.sampling.remembers_rows:
            self._to_replay.extend((token, place in spec.redrawn) for place, token in enumerate(spec.resumed))

    @property
    def drawing(self) -> Drawing | None:
        """As in `Request`."""
        n_drawn = len(self.spec.resumed) + len(self.spec.redrawn)
        drawing = self.sampler.drawing
        return msgspec.structs.replace(drawing, n_drawn=n_drawn) if drawing is not None else None

    def logits_request(self) -> LogitsRequest:
        """What its first rows must bring back."""
        if self.spec.pooling is not None:
            return LogitsRequest(LogitsKind.HIDDEN)
        return (
            self.sampler.replay_logits_request(len(self._to_replay))
            if self._to_replay
            else self.sampler.logits_request()
        )

    def replay(self, rows: Sequence[RowLogits]) -> None:
        """The rows that its next tokens were drawn from, in order."""
        for row in rows:
            self.sampler.replay(row, *self._to_replay.popleft())

    def sample(self, row: RowLogits, ends: frozenset[int]) -> int | None:
        """Draw the next token; None: that takes the whole row. `ends`: tokens that end the text. Raises NoTokenFits."""
        drawn = self.sampler.sample(row)
        if drawn is None:
            return None
        token, redrawn = (drawn.token, drawn.is_second) if isinstance(drawn, Drawn) else (drawn, False)
        self.n_draws = 1 + redrawn
        self.sampler.accept((token,))
        if token not in ends:
            probs = [TokenProb(id, self._vocab.piece(id), logprob) for id, logprob in self.sampler.probs]
            self._sampled.append(Token(token, self.decoder.push(token), (), tuple(probs), redrawn))
        return token

    def finish(self, token: int, ends: frozenset[int]) -> Finish | None:
        """Why the output ends with `token`, the last one sampled; None: it continues. `ends`: as in `sample`."""
        if token in ends:
            return Finish.END_OF_TEXT
        if self.decoder.is_stopped:
            return Finish.STOP_STRING
        return Finish.LENGTH if self._is_late() else None

    def _is_late(self) -> bool:
        """Whether the last token ends a line after the request's time."""
        self._first_s = self._first_s or time.monotonic()
        limit_s = self.spec.t_max_predict_ms / 1e3
        return 0 < limit_s < time.monotonic() - self._first_s and "\n" in self._sampled[-1].text

    def take(self, drafters: tuple[str, ...]) -> Token:
        """The next token that was sampled and not given out yet. `drafters`: as in `Token`."""
        token = self._sampled.popleft()
        return Token(token.id, token.text, drafters, token.probs, token.redrawn)

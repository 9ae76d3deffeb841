"""What a draft model thinks of the target's own text, place by place: for simulations of any policy."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ggpipe.config import DraftConfig, ModelConfig, SamplingConfig
from ggpipe.core.drafting import candidates
from ggpipe.core.messages import KvKind, KvOp, Row, Run, Want, WantKind
from ggpipe.engine.model_file import ModelFile
from ggpipe.engine.sampling import Sampler
from ggpipe.engine.stage import Stage
from ggpipe.engine.vocab import Vocab
from ggpipe.errors import ModelError
from ggpipe.runtime.session import Session

_N_BRANCHES = 16  # wrong guesses that are looked behind together

Candidates = tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Opinion:
    """What the draft says along a text."""

    candidates: tuple[Candidates, ...]
    """For each token of the text: its best candidates with probabilities, the best first."""
    astray: tuple[Candidates, ...]
    """For the place after each, had its best wrong candidate been taken there."""


def check_pair(target: ModelConfig, draft: ModelConfig) -> tuple[int, ...]:
    """Can this draft guess for this target? Returns the tokens that only the draft has. Nothing is loaded but headers.

    Raises ModelError where it cannot.
    """
    target_vocab = Vocab(ModelFile.open(target.path), target)
    try:
        draft_vocab = Vocab(ModelFile.open(draft.path), draft)
        outline = draft_vocab.outline()
        draft_vocab.close()
        target_vocab.check_draft(outline)
        for flag, able in (("-m", target_vocab.rolls_back), ("-md", outline["rolls_back"])):
            if not able:
                raise ModelError(f"the model of {flag} cannot take tokens back: no guesses can be made with it")
        return tuple(range(target_vocab.n_tokens, len(outline["texts"])))
    finally:
        target_vocab.close()


def banned_tokens(session: Session, sampling: SamplingConfig) -> tuple[int, ...]:
    """Tokens that the target never draws."""
    sampler = Sampler(sampling, session.vocab, session.n_ctx)
    sampler.close()
    return sampler.banned


class DraftReader:
    """The whole draft model in this process, reading texts that others wrote."""

    def __init__(self, config: DraftConfig, n_tokens: int, threads: tuple[int, int], banned: tuple[int, ...]) -> None:
        """`n_tokens`: of the longest text with its prompt. `banned`: never candidates."""
        context = replace(config.context, n_ctx=n_tokens + _N_BRANCHES, n_seq=1 + _N_BRANCHES)
        file = ModelFile.open(config.model.path)
        self._stage = Stage(file, (0, file.n_layer), config.model, context, threads)
        self._n_rows = min(context.n_batch, context.n_ubatch)
        self._banned = banned
        self._run_ids = itertools.count(1)

    def read(self, prompt: tuple[int, ...], text: tuple[int, ...], n_candidates: int) -> Opinion:
        """What the draft says at each token of the text."""
        self._stage.forget_all()
        want = Want(WantKind.TOP, n_candidates, self._banned)
        tokens = (*prompt, *text)
        n_prompt, n_read = len(prompt), len(tokens) - 1
        rows = [Row(tokens[pos], pos, (0,), 0, 0 if pos >= n_prompt - 1 else -1) for pos in range(n_read)]
        said: list[Candidates] = []
        for chunk in _chunks(rows, self._n_rows):
            said += self._decode(chunk, (), want)
        wrong = [
            Row(next(t for t, _ in best if t != token), n_prompt + i, (i % _N_BRANCHES + 1,), 0, 0)
            for i, (best, token) in enumerate(zip(said, text, strict=True))
        ]
        astray: list[Candidates] = []
        for chunk in _chunks(wrong, min(_N_BRANCHES, self._n_rows)):
            ops = [op for row in chunk for op in _branch(row.seqs[0], row.pos)]
            astray += self._decode(chunk, tuple(ops), want)
        return Opinion(tuple(said), tuple(astray))

    def _decode(self, rows: Sequence[Row], ops: tuple[KvOp, ...], want: Want) -> list[Candidates]:
        run = Run(next(self._run_ids), 0, tuple(rows), ops, (want,))
        return [candidates(row) for row in self._stage.decode(run, None).rows]

    def close(self) -> None:
        """Free the model. A second call does nothing."""
        self._stage.close()

    def __enter__(self) -> DraftReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _branch(seq: int, end: int) -> tuple[KvOp, KvOp]:
    """Make a sequence that has the text's first `end` tokens."""
    return KvOp(KvKind.RM, seq), KvOp(KvKind.CP, 0, seq, 0, end)


def _chunks(rows: Sequence[Row], n: int) -> Iterator[Sequence[Row]]:
    return (rows[at : at + n] for at in range(0, len(rows), n))

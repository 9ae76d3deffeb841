"""Records a pair of models for simulations: the target's output, and the draft's candidates at each position."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace

from msgspec import structs

from ggpipe.channel.client import EngineClient
from ggpipe.cluster.recording import ModelName, RecordedPrompt, Recording
from ggpipe.config.draft import DraftConfig
from ggpipe.config.engine import EngineConfig
from ggpipe.config.model import ModelConfig
from ggpipe.config.sampling import SamplingConfig
from ggpipe.config.speculation import SpeculationConfig
from ggpipe.core.draft_messages import Adjustments, Candidates, Drawing, Vocabularies
from ggpipe.core.drafters.adjusted_rows import N_MORE, AdjustedRows
from ggpipe.core.drafters.draft_state import candidates
from ggpipe.core.drafters.foresight import N_CANDIDATES, Foresight, Mixture
from ggpipe.core.messages import KvKind, KvOp, LogitsKind, LogitsRequest, Row, RowLogits, Run
from ggpipe.core.request import Finish
from ggpipe.core.request_spec import RequestSpec
from ggpipe.errors import Interrupted, ModelError, Setting, UsageError
from ggpipe.llama import machine
from ggpipe.llama.gguf import ModelFile
from ggpipe.llama.sampler import Sampler
from ggpipe.llama.stage import Stage
from ggpipe.llama.vocab import Vocab
from ggpipe.stats.records import RequestStats

_LARGE_CONTEXT = 1 << 20  # penalties for the whole context are for the whole text
_N_BRANCHES = 16  # rejected draft tokens that are decoded together


@dataclass(frozen=True, kw_only=True)
class RecordSpec:
    """What to record."""

    target: EngineConfig
    draft: DraftConfig
    prompts: Sequence[tuple[str, str]]
    """(name, text) of each prompt."""
    sampling: SamplingConfig
    n_predict: int
    n_candidates: int
    """Number of the draft's candidates to keep at each position."""


@dataclass(frozen=True)
class DraftTrace:
    """The draft's candidates along an output, with their probabilities, the most likely first."""

    candidates: tuple[Candidates, ...]
    """Candidates for each token of the output."""
    after_rejection: tuple[Candidates, ...]
    """For each token: candidates for the next position if the best rejected candidate had been in its place."""


@dataclass(frozen=True)
class WrittenText:
    """A prompt, and the target's output."""

    name: str
    prompt: tuple[int, ...]
    text: tuple[int, ...]


def write_texts(
    engine: EngineClient,
    spec: RecordSpec,
    on_request: Callable[[RequestStats], None] = lambda stats: None,
    on_text: Callable[[str], None] = lambda text: None,
    warn: Callable[[str], None] = lambda line: None,
) -> tuple[list[WrittenText], int]:
    """Generate an output for each prompt with a loaded target. Returns the outputs, and the seed of all of them.

    If the user stops it, `warn` gets a line, and the outputs so far are returned. Raises UsageError for an empty
    output, and Interrupted if it was stopped before there was any output.
    """
    sampling, written, is_stopped = spec.sampling, [], False
    prompts = [engine.tokenize(text) for _, text in spec.prompts]
    for prompt in prompts:
        engine.check_prompt(prompt)
    for (name, _), prompt in zip(spec.prompts, prompts, strict=True):
        stats = RequestStats()
        on_request(stats)
        text: list[int] = []
        iterative = SpeculationConfig(mode="iterative")
        request = RequestSpec(prompt=prompt, sampling=sampling, n_predict=spec.n_predict, speculation=iterative)
        for token in engine.stream(request, stats):
            text.append(token.id)
            on_text(token.text)
        on_text("\n")
        sampling = replace(sampling, seed=stats.seed)
        is_stopped = stats.finish is Finish.STOPPED
        if text:
            written.append(WrittenText(name, prompt, tuple(text)))
        elif not is_stopped:
            raise UsageError(f"the output for {name} is empty: set ", Setting("ignore_eos"), ", or use another prompt")
        if is_stopped:
            break
    if not written:
        raise Interrupted("stopped before there was any output to record")
    if is_stopped:
        warn("stopped; the output so far is recorded")
    return written, sampling.seed


def record_draft(spec: RecordSpec, written: Sequence[WrittenText], seed: int, pair: Pair) -> Recording:
    """Run the draft over the target's outputs, in this process. `seed`: of all outputs."""
    n_tokens = max(len(own.prompt) + len(own.text) for own in written)
    threads = _threads(spec.target, spec.draft, machine.cores())
    prompts = []
    with DraftReader(spec.draft, n_tokens, threads, pair.vocabularies, pair.banned) as reader:
        for own in written:
            foresight = None
            if pair.drawing is not None:
                foresight = Foresight(structs.replace(pair.drawing, seed=seed), Mixture())
            trace = reader.read(own.prompt, own.text, spec.n_candidates, foresight, pair.adjustments)
            prompts.append(
                RecordedPrompt(
                    name=own.name, prompt=own.prompt, text=own.text, candidates=trace.candidates,
                    after_rejection=trace.after_rejection,
                )
            )  # fmt: skip
    target, draft = (
        ModelName(part.model.path.name, ModelFile.open(part.model.path).fingerprint)
        for part in (spec.target, spec.draft)
    )
    sampling = {name: value for name, value in asdict(spec.sampling).items() if name != "seed"}
    return Recording(target=target, draft=draft, seed=seed, sampling=sampling, prompts=tuple(prompts))


def _threads(config: EngineConfig, draft: DraftConfig, cores: int) -> tuple[int, int]:
    """The draft's threads for single tokens, and for batches. The target is done, so all cores are free."""
    single, batch = config.pipeline.threads_of(0, cores)
    if draft.threads > 0:
        single = batch = draft.threads
    return single, batch if draft.threads_batch < 0 else draft.threads_batch


@dataclass(frozen=True, kw_only=True)
class Pair:
    """What a recording needs from the headers of both models."""

    vocabularies: Vocabularies
    banned: tuple[int, ...]
    """Tokens that the target never samples."""
    drawing: Drawing | None = None
    """How tokens are drawn, but for the seed, as in `Request`."""
    adjustments: Adjustments | None = None
    """As in `Request`."""


def check_pair(target: ModelConfig, draft: ModelConfig, sampling: SamplingConfig) -> Pair:
    """Check that a draft fits a target, by their headers. Raises ModelError if it does not."""
    target_vocab = Vocab(ModelFile.open(target.path), target)
    try:
        draft_vocab = Vocab(ModelFile.open(draft.path), draft)
        outline = draft_vocab.outline()
        draft_vocab.close()
        vocabularies = target_vocab.with_draft(outline)
        for field, able in (("model", target_vocab.rolls_back), ("draft.model", outline.rolls_back)):
            if not able:
                raise ModelError(Setting(field), " cannot roll back its KV state, so it cannot be used for speculation")
        with contextlib.closing(Sampler(sampling, target_vocab, _LARGE_CONTEXT)) as sampler:
            return Pair(
                vocabularies=vocabularies,
                banned=sampler.banned,
                drawing=sampler.drawing,
                adjustments=sampler.adjustments,
            )
    finally:
        target_vocab.close()


class DraftReader:
    """The whole draft model, in this process, which predicts each token of the target's outputs."""

    def __init__(
        self,
        config: DraftConfig,
        n_tokens: int,
        threads: tuple[int, int],
        vocabularies: Vocabularies,
        banned: tuple[int, ...],
    ) -> None:
        """`n_tokens`: of the longest output with its prompt. `threads`: for single tokens, and for batches. `banned`:
        tokens that the target never samples."""
        context = replace(config.context, n_ctx=n_tokens + _N_BRANCHES, n_seq=1 + _N_BRANCHES)
        file = ModelFile.open(config.model.path)
        self._stage = Stage(file, (0, file.n_layer), config.model, context, threads)
        self._n_rows = min(context.n_batch, context.n_ubatch)
        self._vocabularies = vocabularies
        self._banned = (*banned, *vocabularies.only_draft)
        self._run_ids = itertools.count(1)

    def read(
        self,
        prompt: tuple[int, ...],
        text: tuple[int, ...],
        n_candidates: int,
        foresight: Foresight | None = None,
        adjustments: Adjustments | None = None,
    ) -> DraftTrace:
        """The draft's candidates at each token of an output. `foresight`: what the draft knows of the draws.
        `adjustments`: of the logits that the output was chosen by."""
        self._stage.forget_all()
        n, temp = n_candidates, 0.0
        if foresight is not None:
            n, temp = max(n, N_CANDIDATES), foresight.drawing.whole_temp
        if adjustments is not None:
            n += N_MORE
        logits_request = LogitsRequest(LogitsKind.TOP, n, self._banned, temp=temp)
        own_rows = AdjustedRows(adjustments or Adjustments(), prompt)
        tokens = [self._vocabularies.for_draft(token) for token in (*prompt, *text)]
        n_prompt, n_read = len(prompt), len(tokens) - 1
        rows = [
            Row(token=tokens[pos], pos=pos, seqs=(0,), request=0, logits_request=0 if pos >= n_prompt - 1 else -1)
            for pos in range(n_read)
        ]
        on_text: list[Candidates] = []
        for chunk in _chunks(rows, self._n_rows):
            for row in self._decode(chunk, (), logits_request):
                place = len(on_text)
                row = own_rows.adjusted(row, (), temp)
                own_rows.accept(text[place])
                on_text.append(_candidates(row, place, n_candidates, foresight))
                if foresight is not None:
                    foresight.learn(row, place, text[place])
        rejected = [
            Row(
                token=next(t for t, _ in best if t != token),
                pos=n_prompt + i,
                seqs=(i % _N_BRANCHES + 1,),
                request=0,
                logits_request=0,
            )
            for i, (best, token) in enumerate(zip(on_text, text, strict=True))
        ]
        after_rejection: list[Candidates] = []
        own_rows = AdjustedRows(adjustments or Adjustments(), prompt)
        for chunk in _chunks(rejected, min(_N_BRANCHES, self._n_rows)):
            ops = [op for row in chunk for op in _branch(row.seqs[0], row.pos)]
            for read, row in zip(chunk, self._decode(chunk, tuple(ops), logits_request), strict=True):
                row = own_rows.adjusted(row, (read.token,), temp)
                own_rows.accept(text[len(after_rejection)])
                after_rejection.append(_candidates(row, len(after_rejection) + 1, n_candidates, foresight))
        return DraftTrace(tuple(on_text), tuple(after_rejection))

    def _decode(self, rows: Sequence[Row], ops: tuple[KvOp, ...], logits_request: LogitsRequest) -> Sequence[RowLogits]:
        run = Run(id=next(self._run_ids), rows=tuple(rows), ops=ops, logits_requests=(logits_request,))
        return self._stage.decode(run, None).rows

    def close(self) -> None:
        """Free the model. A second call does nothing."""
        self._stage.close()

    def __enter__(self) -> DraftReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _candidates(row: RowLogits, place: int, n: int, foresight: Foresight | None) -> Candidates:
    return candidates(row)[:n] if foresight is None else foresight.candidates(row, place, n)


def _branch(seq: int, end: int) -> tuple[KvOp, KvOp]:
    """Operations that make a sequence of the first `end` tokens of sequence 0."""
    return KvOp(KvKind.RM, seq), KvOp(KvKind.CP, 0, seq, 0, end)


def _chunks(rows: Sequence[Row], n: int) -> Iterator[Sequence[Row]]:
    return (rows[at : at + n] for at in range(0, len(rows), n))

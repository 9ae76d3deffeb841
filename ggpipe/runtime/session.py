"""An engine in this process, as front ends see it.

with Head(transport, config) as head:
    session = Session.load(head)
    for token in session.generate(session.vocab.tokenize("Once upon"), SamplingConfig(temp=0)):
        print(token.text, end="")
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ggpipe.chat.answer import answer_format
from ggpipe.chat.conversation import CHATML, ChatPrompt, Conversation
from ggpipe.chat.template import ChatTemplate
from ggpipe.chat.tools.grammar import grammar_of_calls
from ggpipe.errors import QueueFull, UsageError
from ggpipe.llama.gguf import ModelFile
from ggpipe.llama.model_header import ModelHeader, n_numbers
from ggpipe.llama.vocab import Vocab
from ggpipe.metrics.stats import RankStats
from ggpipe.runtime import engine
from ggpipe.runtime.channel.client import ClientEvent, ClientRequest, EngineClient, ModelInfo, RequestEnded, TokenReady
from ggpipe.runtime.engine import ActiveRequest, Engine
from ggpipe.runtime.head import Head
from ggpipe.runtime.loading import load_all

_MOST_TEMPLATES = 4  # compiled ones, which take up to a tenth of a second to make: all texts wait meanwhile


class Session(EngineClient):
    """See the module's text. All methods but `stop` belong to the main thread."""

    def __init__(
        self, head: Head, engine: Engine, warnings: tuple[str, ...] = (), model: ModelInfo | None = None
    ) -> None:
        """`head`: the one that the engine was loaded with; it says when the user wants an end."""
        sampling = engine.vocab.sampling()
        super().__init__(head, head.ranks, engine.n_ctx, engine.can_speculate, warnings, sampling, model)
        self.engine = engine
        self.vocab = engine.vocab
        self._head = head
        self._active: dict[int, ActiveRequest] = {}
        self._client_requests: dict[int, ClientRequest] = {}  # by the engine's number
        self._refused: list[ClientEvent] = []
        self._templates: dict[str, ChatTemplate] = {}
        """By source: a model may have one for tools beside the usual one."""

    @classmethod
    def load(cls, head: Head, on_progress: Callable[[], None] = lambda: None) -> Session:
        """Agree with all ranks, then load everywhere; `head.ranks` shows the progress, `on_progress` is called at each.

        Raises the first error that any rank met, and RunError when the user stops it.
        """
        loaded = load_all(head, on_progress)
        engine = Engine(loaded)
        head.at_close(engine.close)
        return cls(head, engine, loaded.warnings, _model_info(loaded.model_file, loaded.vocab))

    @property
    def is_open(self) -> bool:
        return self._head.is_open

    def tokenize(self, text: str) -> tuple[int, ...]:
        return self.vocab.tokenize(text)

    def tokenize_chat(self, conversation: Conversation) -> ChatPrompt:
        conversation.check()
        vocab, tools = self.vocab, conversation.tools
        source = conversation.template or (vocab.template("tool_use") if tools else None) or vocab.template() or CHATML
        template = self._compiled(source)
        own = conversation.begun
        messages = conversation.messages if own is None else conversation.messages[:-1]
        text, begun = template.conversation(messages, tools, **conversation.further)
        answer, choice = answer_format(source, begun, vocab.special_tokens, tools), conversation.choice
        pieces = [*template.pieces(text)]
        if own is not None:
            behind, reasoning = answer.reasoning.begun(own.get("reasoning_content") or "", own.get("content") or "")
            pieces, answer = [*pieces, *behind], replace(answer, reasoning=reasoning)
        grammar = grammar_of_calls(answer.form, answer.reasoning, tools, choice)
        written = "".join(piece for piece, _ in pieces)
        return ChatPrompt(vocab.tokenize_pieces(pieces), answer, written, grammar, choice.must_call)

    def detokenize(self, tokens: Sequence[int], special: bool = False) -> tuple[bytes, ...]:
        self._check_tokens(tokens)
        return tuple(self.vocab.piece(token, special) for token in tokens)

    def _check_tokens(self, tokens: Sequence[int]) -> None:
        wrong = next((token for token in tokens if not 0 <= token < self.vocab.n_tokens), None)
        if wrong is not None:
            raise UsageError(f"the model has no token {wrong}: give numbers from 0 to {self.vocab.n_tokens - 1}")

    def _compiled(self, source: str) -> ChatTemplate:
        if source not in self._templates:
            vocab = self.vocab
            template = ChatTemplate(source, vocab.bos_text, vocab.eos_text, vocab.special_texts)
            if len(self._templates) == _MOST_TEMPLATES:
                del self._templates[next(iter(self._templates))]
            self._templates[source] = template
        return self._templates[source]

    def measure(self) -> None:
        self.engine.measure_usage()

    def align_clocks(self) -> None:
        self.engine.align_clocks()

    def idle(self, seconds: float) -> None:
        self.engine.idle(seconds)

    def _submit(self, request: ClientRequest) -> None:
        try:
            self._check_tokens(request.prompt)
            active = self.engine.submit(
                request.prompt,
                request.sampling,
                request.n_predict,
                request.speculation,
                request.stats,
                request.cache_prompt,
                request.token_ids,
                request.redrawn,
                request.task,
                request.user,
            )
        except (UsageError, QueueFull) as e:
            request.error = e
            self._refused.append(RequestEnded(request))
            return
        self._active[request.id] = active
        self._client_requests[active.id] = request

    def _cancel(self, request: ClientRequest) -> None:
        if request.id in self._active:
            self.engine.cancel(self._active[request.id])

    def _step(self) -> list[ClientEvent]:
        events, self._refused = self._refused, []
        if events:
            return events
        happened = self.engine.step()
        self.n_cells = self.engine.n_cells
        for event in happened:
            match event:
                case engine.TokenReady(active, token):
                    events.append(TokenReady(self._client_requests[active.id], token))
                case engine.RequestEnded(active, rest, embedding):
                    request = self._client_requests.pop(active.id)
                    del self._active[request.id]
                    request.rest, request.not_saved = rest, tuple(active.not_saved)
                    request.n_saved_bytes, request.embedding = active.n_saved_bytes, embedding
                    events.append(RequestEnded(request))
        return events


def _model_info(model_file: ModelFile, vocab: Vocab) -> ModelInfo:
    header = ModelHeader(model_file)
    return ModelInfo(
        chat_template=vocab.template() or "",
        bos_token=vocab.bos_text,
        eos_token=vocab.eos_text,
        vocab_type=vocab.kind,
        n_vocab=vocab.n_tokens,
        n_ctx_train=header.number("context_length"),
        n_embd=header.width,
        n_params=sum(map(n_numbers, model_file.tensors.values())),
        n_bytes=model_file.n_bytes,
        pooling=header.pooling,
        fingerprint=model_file.fingerprint,
    )


class LocalRanks:
    """Ranks whose head is in this process, as a front end sees them before anything is loaded."""

    is_loading = False
    n_restarts = 0
    """Nobody starts them again."""

    def __init__(self, head: Head) -> None:
        self._head = head

    @property
    def ranks(self) -> Sequence[RankStats]:
        """All ranks in order; how far their loading is."""
        return self._head.ranks

    @property
    def stopping(self) -> bool:
        """The user wants an end of what is going on."""
        return self._head.stopping

    @stopping.setter
    def stopping(self, value: bool) -> None:
        self._head.stopping = value

    def is_ending(self) -> bool:
        """The user wants an end of what is going on, or this process is to end."""
        return self._head.is_ending()

    def stop(self) -> None:
        """End loading, or the active requests, soon. From any thread or a signal handler."""
        self._head.stop()

    def load(self) -> Session:
        """Load the models everywhere. Raises the first error that any rank met, RunError when the user stops it."""
        return Session.load(self._head)

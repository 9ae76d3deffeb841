"""An engine in this process, as front ends see it.

with Head(transport, config) as head:
    session = Session.load(head)
    for token in session.stream(RequestSpec(prompt=b"Once upon", sampling=SamplingConfig(temp=0))):
        print(token.text, end="")
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ggpipe.channel.client import ClientRequest, EngineClient
from ggpipe.channel.events import RequestEvent
from ggpipe.channel.messages import ModelInfo
from ggpipe.core.prefixes import PrefixOrder
from ggpipe.core.prompt import Conversation
from ggpipe.engine.engine import EngineCore
from ggpipe.engine.head import Head
from ggpipe.engine.loading import load_all
from ggpipe.errors import Wording
from ggpipe.llama.gguf import ModelFile
from ggpipe.llama.model_header import ModelHeader, n_numbers
from ggpipe.llama.vocab import Vocab
from ggpipe.stats.records import RankStats
from ggpipe.text.chat.conversation import ChatPrompt


class Session(EngineClient):
    """See the module's text. All methods but `stop` belong to the main thread."""

    def __init__(
        self, head: Head, engine: EngineCore, warnings: tuple[Wording, ...] = (), model: ModelInfo | None = None
    ) -> None:
        """`head`: the one that the engine was loaded with; it says when the user wants an end."""
        sampling = engine.vocab.sampling()
        super().__init__(head, head.ranks, engine.n_ctx, engine.can_speculate, warnings, sampling, model)
        self.engine = engine
        self.vocab = engine.vocab
        self._head = head

    @classmethod
    def load(cls, head: Head, on_progress: Callable[[], None] = lambda: None) -> Session:
        """Agree with all ranks, then load everywhere; `head.ranks` shows the progress, `on_progress` is called at each.

        Raises the first error that any rank met, and RunError when the user stops it.
        """
        loaded = load_all(head, on_progress)
        engine = EngineCore(loaded)
        head.at_close(engine.close)
        return cls(head, engine, loaded.warnings, _model_info(loaded.model_file, loaded.vocab))

    @property
    def is_open(self) -> bool:
        return self._head.is_open

    def tokenize(self, text: str) -> tuple[int, ...]:
        return self.vocab.tokenize(text)

    def tokenize_chat(self, conversation: Conversation) -> ChatPrompt:
        return self.engine.prompts.conversation(conversation)

    def detokenize(self, tokens: Sequence[int], special: bool = False) -> tuple[bytes, ...]:
        self.engine.prompts.check(tokens)
        return tuple(self.vocab.piece(token, special) for token in tokens)

    def measure(self) -> None:
        self.engine.measure_usage()

    def align_clocks(self) -> None:
        self.engine.align_clocks()

    def idle(self, seconds: float) -> None:
        self.engine.idle(seconds)

    def _submit(self, request: ClientRequest) -> None:
        self.engine.submit(request.id, request.continued, request.stats)

    def _order(self, order: PrefixOrder) -> None:
        self.engine.order(order)

    def _cancel(self, number: int) -> None:
        self.engine.cancel(number)

    def _step(self) -> list[RequestEvent]:
        events = self.engine.step()
        self.n_cells = self.engine.n_cells
        return events


def _model_info(model_file: ModelFile, vocab: Vocab) -> ModelInfo:
    header = ModelHeader(model_file)
    return ModelInfo(
        chat_template=vocab.template() or "",
        bos_token=vocab.bos_text,
        eos_token=vocab.eos_text,
        end_tokens=vocab.end_tokens,
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
    """Ranks of a session are never restarted."""

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

"""Every rank but the head: one stage, fed by the rank before it; on the first draft rank the draft's head as well."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence

from msgspec import structs

from ggpipe.config.engine import EngineConfig
from ggpipe.config.model import TARGET
from ggpipe.core.draft_messages import MicroBatch
from ggpipe.core.drafters import registry
from ggpipe.core.drafters.base import Drafter, StatesArrived
from ggpipe.core.layout import Layout
from ggpipe.core.messages import RunRecord
from ggpipe.engine import handshake, vocabularies, wiring
from ggpipe.engine.control_channel import ControlChannel, Received
from ggpipe.engine.drafters import DraftHead
from ggpipe.engine.pipeline import Pipeline
from ggpipe.engine.stage_thread import (
    Fetched,
    InputsReady,
    Loaded,
    Loading,
    Notice,
    PartDone,
    Passed,
    ResultReady,
    RunNotice,
    Saved,
    StageFailed,
    StageThread,
)
from ggpipe.errors import GgpipeError, ModelError, RunError, Setting
from ggpipe.llama import machine
from ggpipe.llama.draft_heads import open_draft
from ggpipe.llama.eagle3 import TargetStates
from ggpipe.llama.gguf import ModelFile
from ggpipe.llama.prompt_cache import PrefixFiles, PromptCache
from ggpipe.llama.vocab import Vocab
from ggpipe.transport import codec, draft_codec
from ggpipe.transport.base import HEAD, Kind, Message, Payload, Transport
from ggpipe.transport.control import AskClock, AskUsage, Clock, PrefixSaved, Quit, Usage
from ggpipe.transport.loading_messages import DraftVocab, LoadLayers, StageLoaded, StageLoading, StartDraft

_LONG_S = 3600.0


class Worker:
    """Joins, loads its layers, and serves until the head sends Quit. Its errors go to the head."""

    def __init__(self, transport: Transport, config: EngineConfig, process_rank: int | None = None) -> None:
        """`process_rank`: the rank of this process, where that is another one than the transport's."""
        self._transport = transport
        self._process_rank = transport.rank if process_rank is None else process_rank
        self._config = config
        self._channel: ControlChannel[Notice] = ControlChannel(transport)
        self._inbox = self._channel.inbox
        self._model = config.model_of(transport.rank, transport.size)
        """Id of the model that this rank serves."""
        self._prompt_cache: PromptCache | None = None
        self._prefix_files: PrefixFiles | None = None
        self._target_states: TargetStates | None = None
        """What a draft head or MTP layers read, on their rank."""
        self._draft_head: DraftHead | None = None
        """On the first draft rank, from StartDraft on."""

    def serve(self) -> int:
        """Returns the exit code that the head gave."""
        try:
            model_file = self._open()
            self._prompt_cache = wiring.prompt_cache(self._config, self._transport)
            self._prefix_files = wiring.prefix_files(self._config, self._transport, self._model)
            self._channel.send(HEAD, handshake.hello(self._transport, self._config, model_file, self._model))
            match self._channel.receive().message:
                case Quit(exit_code):
                    return exit_code
                case LoadLayers(layout) as order:
                    with contextlib.closing(self._load(layout, model_file, order)) as pipeline:
                        return self._serve(pipeline)
                case message:
                    raise RunError(f"the head sent {type(message).__name__} instead of Load: use one ggpipe everywhere")
        except GgpipeError as e:
            self._channel.fail(e)
        while True:
            with contextlib.suppress(GgpipeError):
                match self._channel.receive().message:
                    case Quit(exit_code):
                        return exit_code

    def _open(self) -> ModelFile:
        path = self._config.part_of(self._model).model.path
        is_apart = self._process_rank != HEAD
        if is_apart and not path.exists() and not self._config.pipeline.send_weights:
            raise ModelError(f"there is no {path} on this machine: copy it there, or add ", Setting("send_weights"))
        return open_draft(path, self._config.model.path)

    def _load(self, layout: Layout, model_file: ModelFile, order: LoadLayers) -> Pipeline:
        """Our place in the pipeline of the target, or of the draft; our stage begins to load, if we hold layers."""
        rank = self._transport.rank
        leads = self._model != TARGET and rank == layout.head
        if leads:
            with contextlib.closing(Vocab(model_file, self._config.part_of(self._model).model)) as vocab:
                outline = vocab.outline()
                if self._config.is_mtp(self._model):
                    outline = structs.replace(outline, rolls_back=True)  # recurrent layers are not among them
                self._channel.send(HEAD, DraftVocab(outline))

        def start(deliver: Callable[[RunNotice], None]) -> StageThread:
            stage = layout.stage_of(rank)
            group = wiring.membership(self._config, self._transport, stage.ranks)
            if (needs := wiring.needs_of(self._config, self._model, model_file)) is not None:
                self._target_states = TargetStates(needs.layers)
                load = wiring.head_loader(
                    self._config, self._transport, model_file, self._model, self._target_states, order.warmup
                )
            else:
                load = wiring.stage_loader(
                    self._config,
                    self._transport,
                    model_file,
                    stage.layers,
                    self._model,
                    (self._prompt_cache, self._prefix_files),
                    group,
                    order.warmup,
                    order.inputs,
                    order.stream_memory_gb,
                )
            deliver = deliver if self._transport.sends_from_any_thread else self._inbox.put
            pump = self._inbox.pump if self._transport.must_poll and not leads else None
            poll_s = wiring.poll_s(self._config)
            thread = StageThread(
                self._process_rank,
                load,
                self._inbox.put,
                deliver,
                pump,
                poll_s,
                self._prompt_cache if needs is None else None,
                group,
                self._prefix_files,
            )
            self._inbox.take_run = lambda message: thread.submit_message(message.payload)
            self._inbox.relieved = thread.relief_s
            return thread

        def ended(outcome: ResultReady | Fetched) -> None:
            """Called in the stage's thread where the transport allows."""
            match outcome:
                case ResultReady(result) if self._draft_head is not None:
                    self._draft_head.ended(result)
                    if self._draft_head.wait_s() is not None:
                        self._inbox.call()
                case _ if layout.head == rank:
                    self._inbox.put(outcome)
                case ResultReady(result):
                    self._transport.send(layout.head, Kind.RESULT, codec.result_message(result))
                case Fetched(request, row):
                    self._transport.send(layout.head, Kind.FETCHED, codec.fetched_message(request, row))

        own = start if rank in layout.stage_ranks else None
        return Pipeline(self._transport, layout, rank, ended, own, order.inputs_to)

    def _serve(self, pipeline: Pipeline) -> int:
        """Handle all that comes until Quit; returns its exit code."""
        while True:
            draft_head = self._draft_head
            wait_s = draft_head.wait_s() if draft_head is not None else None
            try:
                match self._channel.next(_LONG_S if wait_s is None else wait_s):
                    case Received(_, Quit(exit_code)):
                        return exit_code
                    case Received(_, StartDraft() as order):
                        self._draft_head = DraftHead(
                            pipeline, self._started(order), self._send_micro_batch, self._forget
                        )
                    case Received(_, AskClock()):
                        self._channel.send(HEAD, Clock(time.monotonic()))
                    case Received(_, AskUsage()):
                        self._channel.send(HEAD, Usage(time.process_time(), machine.resident_bytes()))
                    case Message(_, Kind.CANCEL, payload):
                        pipeline.cancel_own(codec.read_cancel(payload))
                    case Message(_, Kind.FETCH, payload):
                        pipeline.fetch_own(*codec.read_fetch(payload))
                    case Message(_, Kind.TO_DRAFTER, payload) if draft_head is not None:
                        draft_head.handle(draft_codec.read_drafter_message(payload))
                    case Message(_, Kind.STATES, payload) if draft_head is not None:
                        self._take_states(payload, draft_head)
                    case Message(_, Kind.RESULT, payload) if draft_head is not None:
                        draft_head.ended(codec.read_result(payload))
                    case None if draft_head is not None:
                        draft_head.tick()
                    case ResultReady(result) if draft_head is not None:
                        draft_head.ended(result)
                    case Passed() | ResultReady() | PartDone() | Fetched() | InputsReady() as outcome:
                        pipeline.deliver(outcome)
                    case Saved(request, problem, n_bytes):
                        place = f"{self._transport.place}: " if problem else ""
                        self._channel.send(HEAD, PrefixSaved(request, place + problem, n_bytes))
                    case Loading(done_bytes, total_bytes):
                        self._channel.send(HEAD, StageLoading(done_bytes, total_bytes))
                    case Loaded() as loaded:
                        machine.collect_new_objects()
                        self._channel.send(HEAD, self._stage_loaded(loaded))
                    case StageFailed(error):
                        self._channel.fail(error)
            except GgpipeError as e:
                self._channel.fail(e)

    def _started(self, order: StartDraft) -> Drafter:
        drafter: Drafter = registry.WITH_MODEL[order.kind](order.drafter, order.pipeline)
        if not order.tokenizer:
            return drafter
        config = self._config
        own = config.part_of(self._model).model
        return vocabularies.translated(drafter, order.drafter, order.tokenizer, config.model, own)

    def _stage_loaded(self, loaded: Loaded) -> StageLoaded:
        stage = loaded.stage
        return StageLoaded(
            load_s=loaded.load_s,
            threads=wiring.threads_of(self._config, self._transport, self._model),
            resident_bytes=machine.resident_bytes(),
            wanted=dict(stage.cut.wanted),
            produced=dict(stage.cut.produced),
            context=wiring.context_of(stage),
            restored=loaded.restored,
        )

    def _take_states(self, payload: Payload, draft_head: DraftHead) -> None:
        """Some layers' inputs in a run of the target came."""
        assert self._target_states is not None
        run, rows, inputs = codec.read_states(payload)
        if self._target_states.take(run, inputs):
            draft_head.handle(StatesArrived(run, rows))

    def _forget(self, before: int) -> None:
        if self._target_states is not None:
            self._target_states.forget(before)

    def _send_micro_batch(self, micro_batch: MicroBatch, records: Sequence[RunRecord]) -> None:
        self._transport.send(HEAD, Kind.MICRO_BATCH, draft_codec.micro_batch_message(micro_batch, records))

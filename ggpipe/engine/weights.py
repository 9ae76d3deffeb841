"""How machines without a model's files get their weights from the head's machine, and keep them.

A thread of the head answers what the other ranks ask for, over messages apart from all others. A rank gets the headers
first, so that it can do what ranks with the files do: say hello, and be profiled. It gets weights when it loads layers,
those that its machine does not have yet.
"""

from __future__ import annotations

import collections
import contextlib
import hashlib
import itertools
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from ggpipe.cluster.model_file import ModelPart
from ggpipe.config.engine import EngineConfig
from ggpipe.config.model import FIRST_DRAFT, TARGET, ModelConfig
from ggpipe.engine.control_channel import ControlChannel
from ggpipe.errors import GgpipeError, LaunchError, ModelError, RunError, Setting, Wording
from ggpipe.launch.cache_folder import cache_folder
from ggpipe.launch.placement import listed
from ggpipe.llama.gguf import ModelFile, TensorInfo
from ggpipe.llama.layers import OnProgress
from ggpipe.llama.partial_model import Layers, PartialModel, get_weights_with, weights_of
from ggpipe.transport import control
from ggpipe.transport.base import HEAD, Kind, Message, Transport
from ggpipe.transport.loading_messages import ControlMessage
from ggpipe.transport.weights_messages import (
    AllHaveModels,
    AskModel,
    HasModels,
    ModelBytes,
    ModelOutline,
    NotSent,
    ReadModel,
)

M = TypeVar("M", bound=ControlMessage)

_CHUNK_BYTES = 4 << 20
_CHUNKS_ASKED = 4  # at a time, so that neither the disk nor the network waits for requests
_BATCH_BYTES = 1 << 30
_SAMPLES, _SAMPLE_BYTES = 64, 4096  # of the weights, for the digest
_POLL_S, _MOST_POLL_S = 0.5e-3, 0.5
_QUIET_SHARE = 1 / 20  # of the time since the last request, until the next poll
_ATTEND_S = 0.1


def share_models(
    transport: Transport, attend: Callable[[], None], config: EngineConfig, say: Callable[[str | Wording], None]
) -> tuple[EngineConfig, WeightSender | None]:
    """Give each rank models that it can open. All ranks call this at the same time. On the head, `say` gets a line for
    the user.

    Returns the config with the models' paths on this machine and, on the head, the sender of their weights. Raises on
    the head the error of any rank, or LaunchError if this MPI library does not support it; RankError on other ranks.
    """
    if not transport.sends_from_any_thread:
        raise LaunchError(
            Setting("send_weights"), " needs an MPI library that supports several threads: use another one, or omit it"
        )
    lane, channel = transport.duplicate(), ControlChannel[None](transport, attend)
    with channel.failing_together():
        if transport.rank != HEAD:

            def wait() -> None:
                attend()
                channel.next(_POLL_S)  # raises RankError if the head gives up

            receiver = WeightReceiver(lane)
            own = receiver.with_models(config, config.model_of(transport.rank, transport.size), wait)
            channel.send(HEAD, HasModels(receiver.names))
            channel.receive()
            return own, None
        with contextlib.ExitStack() as running:
            sender = running.enter_context(contextlib.closing(WeightSender(lane, config)))
            has_models = channel.gather(HasModels, range(1, transport.size))
            channel.send_to_all(AllHaveModels())
            running.pop_all()
    names = sorted({name for answer in has_models.values() for name in answer.received})
    hosts = dict.fromkeys(transport.hosts[rank] for rank, answer in has_models.items() if answer.received)
    if names:
        keep = "keeps" if len(hosts) == 1 else "keep"
        say(f"{transport.host} sends weights of {listed(names)} to {listed(list(hosts))}, which {keep} them")
    return config, sender


class WeightSender:
    """The head's thread that sends what the other ranks ask for."""

    def __init__(self, lane: Transport, config: EngineConfig) -> None:
        """Raises ModelError if the target cannot be read."""
        self._lane = lane
        self._paths = [config.model.path, *(draft.model.path for draft in config.drafts)]
        self._files = {TARGET: ModelFile.open(config.model.path)}
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._work, name="weights", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """All ranks are leaving: answer no more."""
        self._stopping.set()
        self._thread.join()

    def _work(self) -> None:
        asked_s = time.monotonic()
        while not self._stopping.is_set():
            if (message := _poll(self._lane)) is None:
                quiet_s = time.monotonic() - asked_s
                self._stopping.wait(min(max(quiet_s * _QUIET_SHARE, _POLL_S), _MOST_POLL_S))
                continue
            asked_s = time.monotonic()
            _send(self._lane, message.source, self._answer(message))

    def _answer(self, message: Message) -> ControlMessage:
        try:
            match control.decode(message.payload):
                case AskModel(model):
                    return _outline(self._file(model))
                case ReadModel(model, part, offset, n_bytes):
                    with self._file(model).paths[part].open("rb", buffering=0) as file:
                        return ModelBytes(os.pread(file.fileno(), n_bytes, offset))
                case other:
                    return NotSent(f"{type(other).__name__} is no question: use one ggpipe everywhere")
        except (GgpipeError, OSError) as e:
            return NotSent(str(e))

    def _file(self, model: int) -> ModelFile:
        if model not in self._files:
            self._files[model] = ModelFile.open(self._paths[model])
        return self._files[model]


class WeightReceiver:
    """Asks the head for weights, on another rank. Only one thread at a time may use it."""

    def __init__(self, lane: Transport) -> None:
        self._lane = lane
        self._models: dict[int, PartialModel] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """File names of the models that the head sends."""
        return tuple(model.paths[0].name for model in self._models.values())

    def with_models(self, config: EngineConfig, own: int, wait: Callable[[], None]) -> EngineConfig:
        """The config with paths of partial models for those that this machine lacks. `own`: id of this rank's model.

        `wait` waits for a moment, and may raise to give up. Raises ModelError if the head does not have the rank's own
        model either, RunError if files cannot be written.
        """

        def local(model: ModelConfig, number: int) -> ModelConfig:
            if model.path.exists():
                return model
            try:
                return replace(model, path=self._partial(number, wait).paths[0])
            except ModelError as e:
                if number != own:
                    return model
                raise ModelError(f"{model.path} does not exist, and rank {HEAD} cannot send it: ", e) from e

        drafts = tuple(
            replace(draft, model=local(draft.model, number)) for number, draft in enumerate(config.drafts, FIRST_DRAFT)
        )
        return replace(config, model=local(config.model, TARGET), drafts=drafts)

    def get(self, file: ModelFile, layers: Layers, progress: OnProgress) -> None:
        """See `GetWeights`. Raises RunError if `progress` stopped it, or if the weights cannot be kept; ModelError if
        the head cannot send them."""
        for number, model in self._models.items():
            if model.paths[0] not in file.paths:
                continue
            own = file
            if file.paths.index(model.paths[0]) > 0:  # the target, which lends a draft head some weights
                own = ModelFile.open(model.paths[0])
                names: Collection[str] = file.borrowed.values()
            else:
                read = file.tensors if layers is None else weights_of(file, layers)
                names = [name for name in read if name not in file.borrowed]
            self._get(number, model, own, names, progress)

    def _get(
        self, number: int, model: PartialModel, file: ModelFile, names: Collection[str], progress: OnProgress
    ) -> None:
        done, total, asked_s = 0, 0, time.monotonic()

        def go_on() -> None:
            if not progress(done, max(total, 1)):
                raise RunError("loading was stopped")

        def wait() -> None:
            nonlocal asked_s
            if time.monotonic() > asked_s + _ATTEND_S:
                asked_s = time.monotonic()
                go_on()
            time.sleep(_POLL_S)

        with model.locked(wait):
            lacking = model.lacking(file, names)
            total = sum(file.tensors[name].size for name in lacking)
            for batch in _batches(lacking, file):
                with model.adding(batch, sum(file.tensors[name].size for name in batch)) as write:
                    for part, offset, data in self._read(number, [file.tensors[name] for name in batch], wait):
                        write(part, offset, data)
                        done += len(data)
                        go_on()

    def _read(
        self, model: int, tensors: Sequence[TensorInfo], wait: Callable[[], None]
    ) -> Iterator[tuple[int, int, bytes]]:
        """Parts, offsets and bytes of a model's tensors, from the head."""
        asked: collections.deque[ReadModel] = collections.deque()
        chunks = (
            ReadModel(model, tensor.file, offset, min(_CHUNK_BYTES, tensor.offset + tensor.size - offset))
            for tensor in tensors
            for offset in range(tensor.offset, tensor.offset + tensor.size, _CHUNK_BYTES)
        )
        while True:
            for chunk in itertools.islice(chunks, _CHUNKS_ASKED - len(asked)):
                _send(self._lane, HEAD, chunk)
                asked.append(chunk)
            if not asked:
                return
            answer, chunk = self._answer(ModelBytes, wait), asked.popleft()
            if len(answer.data) != chunk.n_bytes:
                raise ModelError(f"rank {HEAD}'s file was cut off while it was read: copy it there again")
            yield chunk.part, chunk.offset, answer.data

    def _partial(self, number: int, wait: Callable[[], None]) -> PartialModel:
        _send(self._lane, HEAD, AskModel(number))
        outline = self._answer(ModelOutline, wait)
        folder = cache_folder("weights") / f"{Path(outline.parts[0].name).stem}-{outline.digest}"
        model = PartialModel([folder / part.name for part in outline.parts])
        with model.locked(wait):
            if not model.has_headers:
                headers = [TensorInfo(i, 0, part.header_bytes, "") for i, part in enumerate(outline.parts)]
                read = [b"".join(data for *_, data in self._read(number, [header], wait)) for header in headers]
                model.write_headers(read, [part.n_bytes for part in outline.parts])
        self._models[number] = model
        get_weights_with(self.get, model)
        return model

    def _answer(self, kind: type[M], wait: Callable[[], None]) -> M:
        while (message := _poll(self._lane)) is None:
            wait()
        answer = control.decode(message.payload)
        if isinstance(answer, NotSent):
            raise ModelError(answer.problem)
        if not isinstance(answer, kind):
            raise RunError(
                f"the head sent {type(answer).__name__} instead of {kind.__name__}: use one ggpipe everywhere"
            )
        return answer


def _outline(file: ModelFile) -> ModelOutline:
    digest = hashlib.sha256(file.fingerprint.encode())
    tensors = sorted(file.tensors.values(), key=lambda tensor: (tensor.file, tensor.offset))
    for tensor in tensors[:: -(-len(tensors) // _SAMPLES)]:
        with file.paths[tensor.file].open("rb", buffering=0) as part:
            digest.update(os.pread(part.fileno(), min(tensor.size, _SAMPLE_BYTES), tensor.offset))
    parts = zip(file.paths, file.header_bytes, strict=True)
    outlines = tuple(ModelPart(path.name, path.stat().st_size, header_bytes) for path, header_bytes in parts)
    return ModelOutline(digest.hexdigest()[:16], outlines)


def _batches(names: Sequence[str], file: ModelFile) -> Iterator[list[str]]:
    """Weights that are kept together; an interruption loses one batch at most."""
    batch: list[str] = []
    n_bytes = 0
    for name in names:
        batch.append(name)
        n_bytes += file.tensors[name].size
        if n_bytes >= _BATCH_BYTES:
            yield batch
            batch, n_bytes = [], 0
    if batch:
        yield batch


def _send(lane: Transport, rank: int, message: ControlMessage) -> None:
    payload = control.encode(message)
    while True:
        with contextlib.suppress(TimeoutError):  # another thread is blocked in MPI
            lane.send(rank, Kind.CONTROL, payload)
            return


def _poll(lane: Transport) -> Message | None:
    with contextlib.suppress(TimeoutError):
        return lane.poll()
    return None

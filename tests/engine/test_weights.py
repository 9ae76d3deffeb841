"""Machines without a model's file get the weights of their layers from the head."""

from __future__ import annotations

import contextlib
import functools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import commands
from support.commands import HANG_S, TARGET, output
from support.zoo import split, without

from ggpipe.config.draft import DraftConfig
from ggpipe.config.engine import EngineConfig
from ggpipe.config.model import ModelConfig
from ggpipe.engine.weights import WeightReceiver, WeightSender
from ggpipe.errors import ModelError, RunError
from ggpipe.launch.environment import mpi_environment
from ggpipe.launch.mpirun import find_mpirun, mpirun_command
from ggpipe.llama import partial_model
from ggpipe.llama.completed import complete
from ggpipe.llama.gguf import ModelFile
from ggpipe.llama.partial_model import weights_of
from ggpipe.transport.local import LocalWorld

DRAFT, HEAD = TARGET.with_name("tales-draft.gguf"), TARGET.with_name("tales-eagle3.gguf")
TEXT = ("generate", "-f", "prompts/tale.txt", "-n", 40, "-c", 512, "-t", 1, "--temp", 0, "--ignore-eos")
THERE = ("-m", "/nowhere/target.gguf", "-md", "/nowhere/draft.gguf")


def on_two_machines(
    n_here: int, n_there: int, *arguments: object, cache: Path, here: tuple[object, ...], there: tuple[object, ...]
) -> subprocess.CompletedProcess[str]:
    """`ggpipe ARGUMENTS` on ranks that find models under other names. `cache`: for those that find none."""
    rank = [sys.executable, "-m", "ggpipe", *map(str, arguments)]
    command = [*mpirun_command(find_mpirun(), n_here, None, ()), *rank, *map(str, here)]
    command += [":", "-n", str(n_there), *rank, *map(str, there)]
    return commands._run(command, HANG_S, {**mpi_environment(), "XDG_CACHE_HOME": str(cache)})


@functools.cache
def whole(*arguments: object) -> str:
    return output(*TEXT, "-m", TARGET, *arguments)


def files_in(cache: Path) -> dict[str, tuple[float, int]]:
    """When each was changed, and its bytes on the disk."""
    found = {path.name: path.stat() for path in cache.rglob("*.gguf")}
    return {name: (status.st_mtime, status.st_blocks * 512) for name, status in found.items()}


@pytest.mark.parametrize(
    ("layout", "n_here", "n_there", "drafts"),
    [
        ("0.5,0.5/1.0", 1, 2, True),
        ("1.0*2", 1, 1, False),
        pytest.param("auto", 1, 2, True, marks=pytest.mark.only_full),
    ],
)
def test_the_same_text(layout: str, n_here: int, n_there: int, drafts: bool, tmp_path: Path) -> None:
    n_models = 4 if drafts else 2
    exact = ("--exact",) if layout.startswith("0.5") else ()
    arguments = (*TEXT, *exact, "--send-weights", "--mpi-layer-split", layout)
    here = ("-m", TARGET, "-md", DRAFT)[:n_models]
    changed: list[dict[str, tuple[float, int]]] = []
    for _ in range(2):
        result = on_two_machines(n_here, n_there, *arguments, cache=tmp_path, here=here, there=THERE[:n_models])
        assert result.returncode == 0, result.stderr
        if layout != "auto":
            assert result.stdout == whole(*(exact or ("--mpi-layer-split", layout)))
        assert " sends weights of " in result.stderr
        changed.append(files_in(tmp_path))
    assert changed[0] == changed[1]  # the second time, nothing is sent
    target = changed[0][TARGET.name][1]
    assert 0 < target < (0.8 if drafts else 1.1) * TARGET.stat().st_size


def test_files_in_parts(tmp_path: Path) -> None:
    parts = split(TARGET, tmp_path / "tales", 3)
    there = ("-m", "/nowhere/target.gguf")
    arguments = (*TEXT, "--exact", "--send-weights", "--mpi-layer-split", "0.5,0.5")
    result = on_two_machines(1, 1, *arguments, cache=tmp_path / "cache", here=("-m", parts[0]), there=there)
    assert (result.returncode, result.stdout) == (0, whole("--exact")), result.stderr
    assert sorted(files_in(tmp_path / "cache")) == [part.name for part in parts]


@pytest.mark.parametrize(
    ("asks", "here", "why"),
    [
        ((), ("-m", TARGET), "there is no /nowhere/target.gguf on this machine: copy it there, or add --send-weights"),
        (
            ("--send-weights",),
            ("-m", "/nowhere/else.gguf"),
            "ggpipe: error: cannot open model file /nowhere/else.gguf: No such file or directory",
        ),
    ],
)
def test_mistakes(asks: tuple[str, ...], here: tuple[object, ...], why: str, tmp_path: Path) -> None:
    there = ("-m", "/nowhere/target.gguf")
    result = on_two_machines(2, 1, *TEXT, *asks, cache=tmp_path, here=here, there=there)
    assert why in result.stderr
    assert result.stderr.count("error:") == 1
    assert "Traceback" not in result.stderr


# Without MPI


@contextlib.contextmanager
def receiving(config: EngineConfig) -> Iterator[WeightReceiver]:
    """A rank's receiver; its head sends the models of `config`."""
    head, rank = LocalWorld(2).transports
    with contextlib.closing(WeightSender(head, config)):
        yield WeightReceiver(rank)


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(partial_model, "_sources", {})


def config(target: Path, *drafts: Path) -> EngineConfig:
    models = tuple(DraftConfig(model=ModelConfig(path=path)) for path in drafts)
    return EngineConfig(ModelConfig(path=target), drafts=models)


ELSEWHERE = config(Path("/nowhere/target.gguf"))


def received(receiver: WeightReceiver, names: EngineConfig = ELSEWHERE) -> EngineConfig:
    return receiver.with_models(names, 0, lambda: None)


def go_on(_done: int, _total: int) -> bool:
    return True


def test_progress_and_a_stop(tmp_path: Path) -> None:
    seen = []

    def progress(done: int, total: int) -> bool:
        seen.append((done, total))
        return done < total / 2

    with receiving(config(TARGET)) as receiver:
        file = ModelFile.open(received(receiver).model.path)
        with pytest.raises(RunError, match="loading was stopped"):
            receiver.get(file, (0, file.n_layer), progress)
    assert seen[-1][0] >= seen[-1][1] / 2
    assert seen[-1][1] == file.n_bytes
    with receiving(config(TARGET)) as receiver:
        file = ModelFile.open(received(receiver).model.path)
        receiver.get(file, (0, file.n_layer), go_on)
    partial_model.check(file, list(file.tensors))
    own, sent = TARGET.read_bytes(), file.paths[0].read_bytes()
    assert all(own[t.offset : t.offset + t.size] == sent[t.offset : t.offset + t.size] for t in file.tensors.values())


def test_a_head_that_takes_weights_from_its_target(tmp_path: Path) -> None:
    bare_head = without(HEAD, tmp_path / "bare.gguf", "^token_embd|^output.weight")
    names = config(Path("/nowhere/target.gguf"), Path("/nowhere/head.gguf"))
    with receiving(config(TARGET, bare_head)) as receiver:
        there = received(receiver, names)
        target, head = there.model.path, there.drafts[0].model.path
        file = complete(ModelFile.open(head), lambda: ModelFile.open(target))
        assert file.borrowed
        receiver.get(file, None, go_on)
        partial_model.check(ModelFile.open(head), list(ModelFile.open(head).tensors))
        whole_target = ModelFile.open(target)
        partial_model.check(whole_target, list(file.borrowed.values()))
        with pytest.raises(ModelError, match=r"needs blk\."):
            partial_model.check(whole_target, weights_of(whole_target, (0, 1)))


def test_other_weights_with_the_same_header_are_another_copy(tmp_path: Path) -> None:
    path, paths = tmp_path / "model.gguf", set()
    path.write_bytes(TARGET.read_bytes())
    for byte in (b"\x00", b"\x01"):
        with path.open("r+b") as file:
            file.seek(ModelFile.open(path).header_bytes[0])
            file.write(byte)
        with receiving(config(path)) as receiver:
            paths.add(received(receiver).model.path)
    assert len(paths) == 2


def test_a_file_that_is_cut_off_or_gone_while_it_is_sent(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(TARGET.read_bytes())
    with receiving(config(path)) as receiver:
        file = ModelFile.open(received(receiver).model.path)
        with path.open("r+b") as cut:
            cut.truncate(path.stat().st_size // 2)
        with pytest.raises(ModelError, match="rank 0's file was cut off while it was read"):
            receiver.get(file, (0, file.n_layer), go_on)
    path.write_bytes(TARGET.read_bytes())
    with receiving(config(path)) as receiver:
        file = ModelFile.open(received(receiver).model.path)
        path.unlink()
        with pytest.raises(ModelError, match="No such file"):
            receiver.get(file, (0, file.n_layer), go_on)


def test_a_draft_model_of_other_ranks_need_not_be_there() -> None:
    names = config(Path("/nowhere/target.gguf"), Path("/nowhere/draft.gguf"))
    with receiving(config(TARGET, Path("/not/here.gguf"))) as receiver:
        there = receiver.with_models(names, 0, lambda: None)
        assert there.drafts[0].model.path == names.drafts[0].model.path
        with pytest.raises(ModelError, match=r"/nowhere/draft\.gguf does not exist, and rank 0 cannot send it"):
            receiver.with_models(names, 1, lambda: None)

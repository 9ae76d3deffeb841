"""Model files that are what they say, and those that are not: each ends in one line that says what to do."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from support.zoo import make, split

from ggpipe.config.context import ContextConfig
from ggpipe.config.model import ModelConfig
from ggpipe.errors import ModelError, SettingError
from ggpipe.llama.gguf import ModelFile
from ggpipe.llama.stage import Stage
from ggpipe.llama.vocab import Vocab


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make("llama-tied", tmp_path_factory.mktemp("model") / "whole.gguf")
    return path


@pytest.fixture
def parts(whole: Path, tmp_path: Path) -> list[Path]:
    return split(whole, tmp_path / "part", 3)


def refused(path: Path, open_it: Callable[[Path], object] = ModelFile.open) -> str:
    """The one line that a user sees."""
    with pytest.raises(ModelError) as caught:
        open_it(path)
    message = str(caught.value)
    assert "\n" not in message
    assert caught.value.exit_code == 2
    return message


def load_vocab(path: Path) -> Vocab:
    return Vocab(ModelFile.open(path), ModelConfig(path=path))


def load_stage(path: Path) -> Stage:
    file = ModelFile.open(path)
    return Stage(file, (0, file.n_layer), ModelConfig(path=path), ContextConfig(n_ctx=64), (1, 1))


def write(path: Path, architecture: str, has_weights: bool = True, **metadata: int | str) -> Path:
    """A GGUF file with one tensor, or none, and this metadata; `__` in a key stands for a dot."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        add = writer.add_uint32 if isinstance(value, int) else writer.add_string
        add(key.replace("__", "."), value)  # type: ignore[arg-type]
    if has_weights:
        writer.add_tensor("token_embd.weight", np.zeros((4, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_header(whole: Path) -> None:
    file = ModelFile.open(whole)
    reader = gguf.GGUFReader(whole)
    assert file.paths == (whole,)
    assert (file.architecture, file.n_layer, file.tied_output) == ("llama", 3, True)
    assert file.header_bytes == (reader.data_offset,)
    assert file.metadata["llama.embedding_length"] == 64
    assert file.array_lengths["tokenizer.ggml.tokens"] == 384
    assert {n: (t.offset, t.size, t.type.upper()) for n, t in file.tensors.items()} == {
        t.name: (t.data_offset, t.n_bytes, t.tensor_type.name) for t in reader.tensors
    }
    assert file.n_bytes == sum(t.n_bytes for t in reader.tensors)


def test_split_header(whole: Path, parts: list[Path]) -> None:
    file, one = ModelFile.open(parts[0]), ModelFile.open(whole)
    assert file.paths == tuple(parts)
    assert file.n_bytes == one.n_bytes
    assert file.metadata.items() >= one.metadata.items()
    assert len(file.header_bytes) == 3
    for name, tensor in file.tensors.items():
        of_one = one.tensors[name]
        data = parts[tensor.file].read_bytes()[tensor.offset : tensor.offset + tensor.size]
        assert data == whole.read_bytes()[of_one.offset : of_one.offset + of_one.size]


def test_names_of_any_kind(whole: Path, tmp_path: Path) -> None:
    for name in ("with space.gguf", "modèle-模型.gguf", os.fsdecode(b"not-utf8-\xff.gguf")):
        path = tmp_path / name
        shutil.copy(whole, path)
        load_vocab(path).close()
        load_stage(path).close()


def test_cut_while_it_is_loaded(whole: Path, tmp_path: Path) -> None:
    """Memory of a file that has become shorter must not be touched: that would kill the process."""
    path = tmp_path / "model.gguf"
    shutil.copy(whole, path)
    file = ModelFile.open(path)

    def cut(_done: int, _all: int) -> bool:
        os.truncate(path, file.header_bytes[0])
        return True

    model = ModelConfig(path=path, load_mode="mmap", repack=False)
    with pytest.raises(ModelError, match=f"cannot read {path} into memory: .*; copy it again"):
        Stage(file, (1, 2), model, ContextConfig(n_ctx=64), (1, 1), cut)


def test_missing(tmp_path: Path) -> None:
    assert refused(tmp_path / "no.gguf") == f"cannot open model file {tmp_path / 'no.gguf'}: No such file or directory"
    assert refused(tmp_path).endswith("Is a directory")


def test_a_name_that_is_nearly_a_file_s(tmp_path: Path) -> None:
    (tmp_path / "llama-8b.Q4_K_M.gguf").write_bytes(b"")
    for name in ("lama-8b.Q4_K_M.gguf", "llama-8b.Q4_K_M", "llama-8b.q4_k_m.gguf"):
        assert refused(tmp_path / name).endswith(f"; did you mean {tmp_path / 'llama-8b.Q4_K_M.gguf'}?")
    assert refused(tmp_path / "qwen.gguf").endswith("No such file or directory")
    (tmp_path / "looped.gguf").symlink_to(tmp_path / "looped.gguf")  # nobody, root included, can open it
    assert "did you mean" not in refused(tmp_path / "looped.gguf")
    assert refused(tmp_path).endswith("name a file in it")
    assert "name its repository on the Hugging Face Hub" in refused(Path("https://a.org/b.gguf"))
    assert "without quotes" in refused(Path("~/b.gguf"))


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    assert "it is a pipe" in refused(tmp_path / "pipe.gguf")


@pytest.mark.parametrize("n_layer", [513, 65535, 2**32 - 1])
def test_more_layers_than_libllama_takes(n_layer: int, tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", "llama", llama__block_count=n_layer)
    assert f"its header counts {n_layer} layers, and libllama takes at most 512" in refused(path)


@pytest.mark.parametrize("content", [b"", b"GG", b"hello world", b"ggml" * 100])
def test_not_gguf(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    assert "is not a GGUF file" in refused(path)


@pytest.mark.parametrize(
    ("version", "problem"),
    [
        (99, "is a GGUF file of version 99, for a newer llama.cpp than ggpipe's, which reads versions up to 3: "),
        (3 << 24, "is big-endian, and this machine is little-endian: convert it"),
        (0x12345678, "is a damaged or truncated GGUF file"),
    ],
)
def test_other_versions(version: int, problem: str, whole: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + version.to_bytes(4, "little") + whole.read_bytes()[8:])
    assert refused(path).startswith(f"{path} {problem}")


@pytest.mark.parametrize("part", ["counts", "metadata", "vocabulary", "tensor names"])
def test_cut_in_the_header(part: str, whole: Path, tmp_path: Path) -> None:
    data, path = whole.read_bytes(), tmp_path / "model.gguf"
    at = {
        "counts": 12,
        "metadata": data.index(b"llama.embedding_length") + 5,
        "vocabulary": data.index(b"<0x7A>"),
        "tensor names": data.index(b"blk.1.attn_q.weight") + 3,
    }
    path.write_bytes(data[: at[part]])
    message = refused(path)
    assert message.startswith(f"{path} is a damaged or truncated GGUF file (")
    assert "unreadable header" not in message  # but what libllama says


@pytest.mark.parametrize("left", [1, 4096, 100_000])
def test_cut_in_the_data(left: int, whole: Path, tmp_path: Path) -> None:
    data, path = whole.read_bytes(), tmp_path / "model.gguf"
    tensors = ModelFile.open(whole).tensors.values()
    end = max(tensor.offset + tensor.size for tensor in tensors)
    path.write_bytes(data[: end - left])
    assert f"{path} is truncated: it has {end - left} bytes and needs at least" in refused(path)
    path.write_bytes(data[:end])  # the padding at the end is not needed
    ModelFile.open(path)


def test_parts(parts: list[Path], tmp_path: Path) -> None:
    assert refused(parts[1]) == f"{parts[1]} is part 2 of 3: give the first part as `model`"
    content = parts[1].read_bytes()
    parts[1].unlink()
    assert f"cannot open model file {parts[1]}: No such file" in refused(parts[0])
    parts[1].write_bytes(content[:-5000])
    assert f"{parts[1]} is truncated" in refused(parts[0])
    parts[1].write_bytes(content[:100])
    assert f"{parts[1]} is a damaged or truncated" in refused(parts[0])
    parts[1].write_bytes(parts[2].read_bytes())
    assert f"{parts[0]}: " in refused(parts[0], load_vocab)
    alone = Path(shutil.copy(parts[0], tmp_path / "alone.gguf"))
    assert refused(alone) == f"{alone} is one of 3 parts, but is not named NAME-00001-of-00003.gguf"


def test_not_a_language_model(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    assert "holds no language model" in refused(write(path, "llama"))
    assert "holds no language model" in refused(write(path, "", general__type="adapter"))
    assert "holds no language model" in refused(write(path, "llama", llama__block_count=0))
    assert "has no weights" in refused(write(path, "llama", False, llama__block_count=2))


@pytest.mark.parametrize("open_it", [load_vocab, load_stage])
def test_unknown_architecture(open_it: Callable[[Path], object], tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", "nonsense", nonsense__block_count=2)
    message = refused(path, open_it)
    assert str(path) in message
    assert "unknown model architecture: 'nonsense'" in message


@pytest.mark.parametrize("open_it", [load_vocab, load_stage])
def test_incomplete_metadata(open_it: Callable[[Path], object], tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", "llama", llama__block_count=2)
    assert str(path) in refused(path, open_it)


def test_missing_tensors(whole: Path, tmp_path: Path) -> None:
    """A header that is sound in itself, but lacks what the architecture needs."""
    data = whole.read_bytes().replace(b"blk.1.attn_q.weight", b"blk.1.attn_X.weight")
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    assert "tensor 'blk.1.attn_q.weight' not found" in refused(path, load_stage)


def test_metadata_of_the_wrong_type(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    refused(write(path, "llama", llama__block_count="three"))
    refused(write(path, "llama", llama__block_count=2, split__count="two"))


@pytest.mark.parametrize("name", [b"llama.context_length", b"blk.1.attn_q.weight"])
def test_damaged_names(name: bytes, whole: Path, tmp_path: Path) -> None:
    """No text: the bytes of a name, of metadata or of a tensor, are no UTF-8."""
    path = tmp_path / "model.gguf"
    path.write_bytes(whole.read_bytes().replace(name, b"\xff" + name[1:]))
    refused(path, load_stage)


def test_fingerprint(whole: Path, parts: list[Path], tmp_path: Path) -> None:
    fingerprint = ModelFile.open(whole).fingerprint
    assert ModelFile.open(Path(shutil.copy(whole, tmp_path / "copy.gguf"))).fingerprint == fingerprint
    data, path = whole.read_bytes(), tmp_path / "other.gguf"
    others = [parts[0], make("llama", tmp_path / "llama.gguf"), make("llama-tied", tmp_path / "deeper.gguf", n_layer=4)]
    seen = {fingerprint, *(ModelFile.open(other).fingerprint for other in others)}
    assert len(seen) == 4
    for changed in (data + b"\0", data.replace(b"<0x7A>", b"<0x7a>")):  # the size alone, one letter of the vocabulary
        path.write_bytes(changed)
        assert ModelFile.open(path).fingerprint not in seen


@pytest.mark.parametrize(
    ("key", "count", "problem"),
    [
        ("expert_used_count", 5, "expert_used_count must be from 1 to expert_count (4), got 5"),
        ("expert_used_count", 0, "expert_used_count must be from 1 to expert_count (4), got 0"),
        ("expert_count", 0, "expert_used_count must be 0, since expert_count is 0, got 2"),
        ("expert_count", 8, "expert_count is 8, and blk.0.ffn_gate_inp.weight is for 4 experts"),
    ],
)
def test_counts_of_experts_that_do_not_fit(key: str, count: int, problem: str, tmp_path: Path) -> None:
    """libllama would end the process."""
    path = make("qwen3moe", tmp_path / "model.gguf")
    override = f"qwen3moe.{key}=int:{count}"
    with pytest.raises(SettingError) as caught:
        Vocab(ModelFile.open(path), ModelConfig(path=path, override_kv=(override,)))
    assert str(caught.value) == f"`override_kv` {override}: {problem}"
    reader = gguf.GGUFReader(path, "r+")
    field = reader.fields[f"qwen3moe.{key}"]
    field.parts[field.data[0]][0] = count
    reader.data.flush()
    assert refused(path) == f"{path} is damaged: {problem}; copy it again, or convert the model again"

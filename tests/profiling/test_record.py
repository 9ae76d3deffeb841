"""`ggpipe record` and its files: they hold the models' own candidates, and one line names a bad file."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import in_process
from support.commands import ROOT, SPLITS, TARGET, ggpipe, mpirun, output
from support.pipeline import local_session
from support.requests import asked
from support.zoo import make

from ggpipe.cluster.recording import BUNDLED, RecordedPrompt, Recording, dump, read
from ggpipe.config.context import ContextConfig
from ggpipe.config.draft import DraftConfig
from ggpipe.config.engine import EngineConfig
from ggpipe.config.model import ModelConfig
from ggpipe.config.pipeline import PipelineConfig
from ggpipe.config.sampling import SamplingConfig
from ggpipe.core.draft_messages import Candidates, Vocabularies
from ggpipe.core.drafters.draft_state import candidates
from ggpipe.core.messages import LogitsKind, LogitsRequest, Row, Run
from ggpipe.display.tables.recording import recording_text
from ggpipe.errors import UsageError
from ggpipe.llama.gguf import ModelFile
from ggpipe.llama.stage import Stage
from ggpipe.llama.vocab import Vocab
from ggpipe.profiling.record import DraftReader, DraftTrace, check_pair
from ggpipe.sim.text import recorded

DRAFT = TARGET.with_name("tales-draft.gguf")
PAIR = ("-m", TARGET, "-md", DRAFT, "-t", "1")
GREEDY = SamplingConfig(temp=0, ignore_eos=True)
N_CANDIDATES = 5
SAME = Vocabularies(n_target=2048, n_draft=2048, stand_in=0)


def trace(
    prompt: tuple[int, ...],
    text: tuple[int, ...],
    n_ubatch: int = 512,
    n: int = N_CANDIDATES,
    fast_kernels: bool = True,
) -> DraftTrace:
    context = ContextConfig(n_ubatch=n_ubatch, fast_kernels=fast_kernels)
    draft = DraftConfig(model=ModelConfig(path=DRAFT), context=context)
    with DraftReader(draft, len(prompt) + len(text), (1, 1), SAME, ()) as reader:
        assert reader.read(text, prompt, 2).candidates  # what was read before leaves nothing behind
        return reader.read(prompt, text, n)


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    stage = Stage(ModelFile.open(DRAFT), (0, 3), ModelConfig(path=DRAFT), ContextConfig(n_ctx=1024), (1, 1))
    yield stage
    stage.close()


def candidates_after(stage: Stage, tokens: tuple[int, ...]) -> Candidates:
    """The draft's candidates after these tokens, from an empty cache."""
    stage.forget_all()
    rows = tuple(
        Row(token=token, pos=pos, seqs=(0,), request=0, logits_request=0 if pos == len(tokens) - 1 else -1)
        for pos, token in enumerate(tokens)
    )
    outcome = stage.decode(
        Run(id=1, rows=rows, ops=(), logits_requests=(LogitsRequest(LogitsKind.TOP, N_CANDIDATES),)), None
    )
    return candidates(outcome.rows[0])


def distance(one: Candidates, other: Candidates) -> float:
    """The greatest difference between two probabilities of a token."""
    a, b = dict(one), dict(other)
    return max(abs(a.get(token, one[-1][1]) - b.get(token, other[-1][1])) for token in a.keys() | b.keys())


def assert_alike(one: Candidates, other: Candidates) -> None:
    """The same tokens with the same probabilities, but for what batch sizes change."""
    assert distance(one, other) <= 0.01


@pytest.mark.parametrize("n_ubatch", [3, 512])
def test_the_draft_is_recorded_at_each_position(stage: Stage, n_ubatch: int) -> None:
    config = EngineConfig(ModelConfig(path=TARGET), ContextConfig(n_ctx=512), PipelineConfig(threads=(1,)))
    with local_session(config, 2) as session:
        prompt = session.vocab.tokenize("Once upon a time there was a king")
        text = tuple(token.id for token in session.stream(asked(prompt, GREEDY, 40)))
    for sampling, banned in ((GREEDY, (0, 2)), (SamplingConfig(), ())):
        assert check_pair(ModelConfig(path=TARGET), ModelConfig(path=DRAFT), sampling).banned == banned
    found = trace(prompt, text, n_ubatch)
    assert len(found.candidates) == len(found.after_rejection) == 40
    for i, (best, after_rejection) in enumerate(zip(found.candidates, found.after_rejection, strict=True)):
        assert_alike(best, candidates_after(stage, (*prompt, *text[:i])))
        rejected = next(token for token, _ in best if token != text[i])
        assert_alike(after_rejection, candidates_after(stage, (*prompt, *text[:i], rejected)))


def test_banned_tokens_are_no_candidates() -> None:
    draft = DraftConfig(model=ModelConfig(path=DRAFT))
    with DraftReader(draft, 8, (1, 1), SAME, ()) as reader:
        best = reader.read((1, 2, 3), (4, 5), 2).candidates[0][0][0]
    with DraftReader(draft, 8, (1, 1), SAME, (best,)) as reader:
        found = reader.read((1, 2, 3), (4, 5), N_CANDIDATES)
    assert best not in {token for place in (*found.candidates, *found.after_rejection) for token, _ in place}


# The command


def record(output: Path, *arguments: object) -> Recording:
    start = ggpipe if "--mpi-layer-split" in arguments else in_process.ggpipe
    done = start("record", *PAIR, "-o", output, *arguments)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    recording = read(output)
    lines = done.stdout.splitlines()
    assert len(lines) == len(recording.prompts) + 3 + 2 * 4 * bool(recording.second_choices)
    for line, take in zip(lines, recording.prompts, strict=False):
        agreement = sum(take.agrees) / len(take.text)
        assert line.split() == [
            *(take.name, str(len(take.text)), "tokens", "agreement", f"{agreement * 100:.0f}", "%"),
            *("confidence", f"{sum(take.confidence) / len(take.text) * 100:.0f}", "%"),
        ]
    n_prompts, n_tokens = len(recording.prompts), sum(len(take.text) for take in recording.prompts)
    assert sum(map(int, lines[n_prompts + 2].split()[1:])) == n_tokens
    if choices := recording.second_choices:
        assert sum(map(int, lines[n_prompts + 6].split()[1:])) == len(choices)
        assert int(lines[-1].split()[1]) == len(choices)
        assert len(choices) == n_tokens - sum(sum(take.agrees) for take in recording.prompts)
    return recording


def text_of(recording: Recording, i: int) -> str:
    vocab = Vocab(ModelFile.open(TARGET), ModelConfig(path=TARGET))
    text = b"".join(vocab.piece(token) for token in recording.prompts[i].text).decode()
    vocab.close()
    return text


def test_records_what_generate_writes(tmp_path: Path) -> None:
    arguments = ("-f", "prompts/tale.txt", "-n", 50, "--temp", 0)
    recording = record(tmp_path / "r.json", *arguments, *SPLITS[2], "-p", "The wolf", "--candidates", N_CANDIDATES)
    assert [take.name for take in recording.prompts] == ["tale.txt", "-p"]
    assert all(
        len(best) == N_CANDIDATES for take in recording.prompts for best in (*take.candidates, *take.after_rejection)
    )
    assert text_of(recording, 0) == output("generate", "-m", TARGET, "-t", 1, *arguments, *SPLITS[2])
    assert recording.target.name == "tales-target.gguf"
    assert recording.draft.fingerprint == ModelFile.open(DRAFT).fingerprint
    assert recording.sampling["temp"] == 0
    for take in recording.prompts:
        found = trace(take.prompt, take.text)
        for a, b in ((take.candidates, found.candidates), (take.after_rejection, found.after_rejection)):
            for one, other in zip(a, b, strict=True):
                assert_alike(one, other)


def test_records_under_mpirun(tmp_path: Path) -> None:
    done = mpirun(2, "record", *PAIR, "-p", "The wolf", "-n", 20, "--temp", 0, "-o", tmp_path / "r.json")
    assert done.returncode == 0, done.stderr
    assert len(read(tmp_path / "r.json").prompts[0].text) == 20


def test_a_drawn_seed_is_noted_and_is_that_of_all_prompts(tmp_path: Path) -> None:
    same = ("-f", "prompts/tale.txt", "-f", "prompts/tale.txt", "-n", 20)
    first = record(tmp_path / "1.json", *same)
    assert first.seed >= 0
    assert first.prompts[0] == first.prompts[1]
    again = record(tmp_path / "2.json", *same, "-s", first.seed)
    assert again == first


def fails(*arguments: object, words: tuple[str, ...]) -> None:
    done = in_process.ggpipe_on_threads("record", *arguments)
    assert done.returncode == 2, done
    assert done.stdout == ""
    line, *more = done.stderr.strip().splitlines()
    assert not more, done.stderr
    assert line.startswith("ggpipe: error: ")
    assert all(word in line for word in words), line


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize(
    ("arch", "words"), [("llama-tied", ("-md/--model-draft does not fit -m/--model",)), ("mamba", ("-md",))]
)
def test_a_wrong_draft(n: int, arch: str, words: tuple[str, ...], tmp_path: Path) -> None:
    draft = make(arch, tmp_path / "draft.gguf")
    fails("-m", TARGET, "-md", draft, "-p", "x", "-o", tmp_path / "r.json", *SPLITS[n], words=words)
    assert not (tmp_path / "r.json").exists()


def test_a_pair_that_cannot_roll_back(tmp_path: Path) -> None:
    model = make("mamba", tmp_path / "mamba.gguf")
    words = ("-m/--model cannot roll back",)
    fails("-m", model, "-md", model, "-p", "x", "-o", tmp_path / "r.json", words=words)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("-m", TARGET, "-p", "x"), ("name one with -md",)),
        (PAIR, ("give one prompt",)),
        ((*PAIR, "-p", "x", "--candidates", "1"), ("--candidates must be a number from 2 to 100, got 1",)),
        ((*PAIR, "-p", "x", "-n", "0"), ("-n", "1 or more")),
        ((*PAIR, "-p", "x", "--mpi-layer-split", "0.5,0.5/1.0"), ("omit the /",)),
        ((*PAIR, "-p", "x", "-f", "nowhere.txt"), ("nowhere.txt",)),
        ((*PAIR, "-p", "x", "-o", "/nowhere/r.json"), ("/nowhere/r.json",)),
    ],
)
def test_bad_arguments(arguments: tuple[object, ...], words: tuple[str, ...], tmp_path: Path) -> None:
    fails("-o", tmp_path / "r.json", *arguments, words=words)


# The files


def test_the_bundled_recording_is_of_the_bundled_pair() -> None:
    recording = read(BUNDLED)
    assert recording.target.fingerprint == ModelFile.open(TARGET).fingerprint
    assert recording.draft.fingerprint == ModelFile.open(DRAFT).fingerprint
    assert [len(take.text) for take in recording.prompts] == [256, 72, 256]  # the second one ends
    assert 0.6 < recording.agreement < 0.8
    vocab = Vocab(ModelFile.open(TARGET), ModelConfig(path=TARGET))
    tale = (ROOT / "prompts" / "tale.txt").read_text().removesuffix("\n")
    assert recording.prompts[0].prompt == vocab.tokenize(tale)
    vocab.close()
    distances: list[float] = []
    for take in recording.prompts:
        found = trace(take.prompt, take.text, n=8, fast_kernels=False)  # as it was recorded
        for a, b in ((take.candidates, found.candidates), (take.after_rejection, found.after_rejection)):
            distances += [distance(one, other) for one, other in zip(a, b, strict=True)]
    # ggml's kernels round otherwise on other CPUs. Where two candidates are nearly equal, another one is then the
    # rejected one, with other candidates after it.
    assert sorted(distances)[int(0.97 * len(distances))] < 0.01


def test_second_choices() -> None:
    """Each position is right (R), or has the second choice right (S) or neither (N)."""
    named = {"R": ((7, 0.6), (8, 0.3)), "S": ((8, 0.5), (7, 0.25)), "N": ((8, 0.4), (9, 0.1)), "1": ((8, 0.4),)}
    texts = ("RRSNR", "S1R")
    prompts = tuple(
        RecordedPrompt(
            name=text,
            prompt=(1,),
            text=(7,) * len(text),
            candidates=tuple(named[kind] for kind in text),
            after_rejection=tuple(named[kind] for kind in text),
        )
        for text in texts
    )
    recording = dataclasses.replace(read(BUNDLED), prompts=prompts)
    found = [(choice.probability, choice.is_right, choice.most_depth) for choice in recording.second_choices]
    assert found == [(0.25, True, 3), (0.1, False, 1), (0.25, True, 1), (0.0, False, 1)]
    assert recording.second_agreement == 0.5
    assert json.loads(dump(recording))["second_agreement"] == 0.5
    lines = [line.split() for line in recording_text(recording).splitlines()]
    assert [line[2:] for line in lines if line[:2] == ["second", "right"]] == [
        ["0", "%", "-", "0", "%", "100", "%", "-"],
        ["50", "%", "100", "%", "100", "%", "-", "-", "-"],
    ]
    assert lines[-1] == ["mistakes", "4", "1", "1", "0", "0", "0"]


def test_a_draft_without_mistakes_has_no_second_choices() -> None:
    (take,) = read(BUNDLED).prompts[:1]
    right = dataclasses.replace(take, candidates=tuple(((token, 0.9),) for token in take.text))
    recording = dataclasses.replace(read(BUNDLED), prompts=(right,))
    assert recording.second_agreement is None
    assert "second" not in dump(recording) + recording_text(recording)


def test_requests_play_it_back() -> None:
    for take in read(BUNDLED).prompts:
        request, n = recorded(take, 600), len(take.text)
        assert request.prompt == take.prompt
        assert request.output[:n] == request.output[n : 2 * n] == take.text
        assert request.candidates(5, False) == take.candidates[5]
        assert request.candidates(5, True) == take.after_rejection[4]


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    recording = read(BUNDLED)
    other = dataclasses.replace(recording, seed=5, prompts=recording.prompts[:1])
    (tmp_path / "r.json").write_text(dump(other))
    assert read(tmp_path / "r.json") == other
    (tmp_path / "r.json").write_text(dump(other).replace("after_rejection", "astray"))  # its name in older files
    assert read(tmp_path / "r.json") == other


def broken(**changes: Any) -> str:
    """A good recording with some fields of its first prompt changed, or of its top where it has such a field."""
    content = json.loads(BUNDLED.read_text())
    content["prompts"] = [{name: part[:3] for name, part in content["prompts"][0].items()}]
    for name, value in changes.items():
        (content if name in content else content["prompts"][0])[name] = value
    return json.dumps(content)


@pytest.mark.parametrize(
    ("content", "word"),
    [
        ("", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[1, 2]", "its format is not"),
        ('{"format": "another"}', "its format is not"),
        ('{"format": "ggpipe recording", "version": 1}', "target is missing"),
        (broken(version=2), "version 2"),
        (broken(target="x"), "target must be a table, got 'x'"),
        (broken(target={"name": 3, "fingerprint": ""}), "target.name must be a string in quotes, got 3"),
        (broken(seed=[]), "seed must be a whole number, got []"),
        (broken(prompts=[]), "prompts must"),
        (broken(prompts={"a": 1}), "prompts must be a list of tables that is not empty, got a table"),
        (broken(text=[1, 2]), "differ in length"),
        (broken(text=[1, 2, -3]), "prompts[0].text[2] must be a whole number from 0 to 2.14748e+09, got -3"),
        (broken(text=[1, 2, True]), "prompts[0].text[2] must be a whole number"),
        (broken(text=[1, 2, 10**400]), ""),
        (broken(prompt=[]), "prompts[0].prompt must"),
        (broken(candidates=[[1, 0.5], [], [1, 0.5]]), "candidates[1] must be a list of numbers from"),
        (broken(candidates=[[1, 0.5], [1, 0.2, 2, 0.5], [1, 0.5]]), "candidates are"),
        (broken(candidates=[[1, 0.5], [1, 0.5, 1, 0.2], [1, 0.5]]), "candidates are"),
        (broken(candidates=[[1, 0.5], [1, 0.5, 2], [1, 0.5]]), "candidates are"),
        (broken(after_rejection=[[1, 0.5], [1, float("nan")], [1, 0.5]]), "not JSON"),
        (broken(after_rejection=[[1, 0.5], [1, 10**400], [1, 0.5]]), "after_rejection[1][1]"),
        (broken(after_rejection=[[1, 1.5], [1, 0.5], [1, 0.5]]), "candidates are"),
        (broken(after_rejection=[[1.5, 0.5], [1, 0.5], [1, 0.5]]), "candidates are"),
        (broken(after_rejection=[[-1, 0.5], [1, 0.5], [1, 0.5]]), "got -1"),
        (broken(after_rejection=[[1, "x"], [1, 0.5], [1, 0.5]]), "after_rejection[0][1] must be a number from 0"),
    ],
)
def test_bad_files(content: str, word: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_text(content)
    with pytest.raises(
        UsageError, match=r"^.*bad\.json is not a usable recording: .*; make one with ggpipe record$"
    ) as e:
        read(path)
    assert word in str(e.value)


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    (path := tmp_path / "bad.json").write_bytes(b'{"format": "\xff"}')
    with pytest.raises(UsageError, match="it is not JSON"):
        read(path)


def test_missing_file(tmp_path: Path) -> None:
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(UsageError, match="cannot read the recording"):
            read(path)

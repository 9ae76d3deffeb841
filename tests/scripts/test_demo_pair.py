"""How the bundled pair is trained: all that needs no torch, which the test environment lacks."""

from __future__ import annotations

import contextlib
import json
import random
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts.models import train_demo_pair
from scripts.models.demo_pair import corpus, outputs, report, tokens, training, workspace
from scripts.models.demo_pair.corpus import Tasks

ROOT = Path(__file__).parents[2]
LINES = (
    'There was once a poor miller who had three sons. "Go," said the miller, "and see the world!" - "I will," said the '
    "eldest. The King of that land heard of it. And the miller was glad, and the miller died.",
    'A fox once came to a meadow in which was a flock of fine fat geese. He smiled and said, "I come just at the right '
    'time." Then the geese cackled. The fox answered that he would eat all the geese.',
    "In olden times lived a king whose daughter was beautiful. Near the castle was a forest. She sat by the well, and "
    "the well was deep. " * 20,
)


@pytest.fixture
def tales(tmp_path: Path) -> list[corpus.Tale]:
    (tmp_path / "tales.txt").write_text("\n\n".join(LINES) + "\n", encoding="utf-8")
    return corpus.read_tales(tmp_path / "tales.txt")


def encode(text: str) -> list[int]:
    """A tokenizer of bytes; control tokens as in the real one."""
    parts = re.split("(" + "|".join(map(re.escape, tokens.SPECIAL)) + ")", text)
    return [i for part in parts for i in ([tokens.SPECIAL.index(part)] if part in tokens.SPECIAL else part.encode())]


def test_sentences_keep_their_quotes() -> None:
    assert corpus.split_sentences('He said, "Go!" - "No." Then he went? Yes.') == [
        'He said, "Go!"',
        '- "No."',
        "Then he went?",
        "Yes.",
    ]


@given(st.text(alphabet="aB .!?\"'-", max_size=60))
def test_no_word_of_a_text_is_lost(text: str) -> None:
    assert "".join("".join(corpus.split_sentences(text)).split()) == "".join(text.split())


def test_what_a_tale_is_about(tales: list[corpus.Tale]) -> None:
    assert [tale.subjects[0] for tale in tales] == ["a poor miller", "a fox", "a king"]
    assert corpus.find_subjects("Once upon a time all was well.") == []


def test_the_last_tales_are_held_back(tales: list[corpus.Tale]) -> None:
    train, held = corpus.keep_back(tales)
    assert (train, held) == (tales[:2], tales[2:])
    assert corpus.keep_back(tales[:2]) == (tales[:1], tales[1:2])
    with pytest.raises(workspace.InputError, match="1 documents; at least 2"):
        corpus.keep_back(tales[:1])


def test_an_empty_text(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text(" \n\n")
    with pytest.raises(workspace.InputError, match="is empty"):
        corpus.read_tales(tmp_path / "empty.txt")


def content_of(prompt: str) -> str:
    assert prompt.startswith(corpus.BOUNDARY)
    assert prompt.endswith("<|im_end|>\n<|im_start|>assistant\n")
    return prompt.split("<|im_start|>user\n")[1].split(corpus.TURN_END)[0]


@pytest.mark.parametrize("seed", range(60))
def test_replies_are_what_was_asked_for(tales: list[corpus.Tale], seed: int) -> None:
    dice, tasks = random.Random(seed), Tasks(tales)
    prompt, reply = tasks.repeat(dice)
    assert reply.endswith(f"{corpus.TURN_END}\n")
    passage = reply.removesuffix(f"{corpus.TURN_END}\n")
    assert content_of(prompt).endswith(f": {passage}")
    assert 0 < len(passage) <= corpus.PASSAGE_CHARACTERS[1]

    prompt, reply = tasks.edit(dice)
    content = content_of(prompt)
    if edit := re.match(r"Replace the (\w+) by (an?) (\w+) in this \w+: ", content):
        old, article, new = edit.groups()
        assert article == ("an" if new[0] in "aeiou" else "a")
        assert reply == corpus.replace_noun(content[edit.end() :], old, new) + f"{corpus.TURN_END}\n"
        assert reply != content[edit.end() :] + f"{corpus.TURN_END}\n"
    else:
        assert content.endswith(reply.removesuffix(f"{corpus.TURN_END}\n"))

    prompt, reply = tasks.tell(dice)
    (tale,) = [tale for tale in tales if reply.startswith(tale.sentences[0])]
    assert reply.endswith(tale.sentences[-1] + f"{corpus.TURN_END}\n")
    assert len(reply) <= corpus.REPLY_CHARACTERS + 20
    assert "tale" in content_of(prompt) or "story" in content_of(prompt)


def test_whole_words_are_replaced() -> None:
    assert corpus.replace_noun("King and king, kingdom, the king's", "king", "queen") == (
        "Queen and queen, kingdom, the queen's"
    )


def test_the_templates_of_training_and_file_agree() -> None:
    jinja2 = pytest.importorskip("jinja2")
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello."}]
    made = jinja2.Template(corpus.CHAT_TEMPLATE).render(messages=messages, add_generation_prompt=True)
    assert corpus.BOUNDARY + made == corpus.request("Hello.", "Be kind.")


def test_a_step_has_the_same_batch_in_each_run(tales: list[corpus.Tale]) -> None:
    stream = tokens.stream_of(encode, tales, 100)
    assert (stream == 0).sum() == len(tales) + 1

    def batches() -> tokens.Batches:
        return tokens.Batches(stream, Tasks(tales), encode, 100, {"text": 2, "tell": 1, "copy": 2, "echo": 1}, seed=4)

    first, again = batches(), batches()
    again(7)
    assert first(3).shape == (6, 101)
    assert np.array_equal(first(3), again(3))
    assert not np.array_equal(first(3), first(4))
    assert list(first(3)[2:5, 0]) == [0, 0, 0], "a request begins its window"
    echo = list(first(3)[5])
    assert any(echo[:n] == echo[n : 2 * n] for n in range(8, 51)), "unrelated tokens, twice"


def test_a_text_shorter_than_a_window(tales: list[corpus.Tale]) -> None:
    with pytest.raises(workspace.InputError, match="--window"):
        tokens.stream_of(encode, tales[:1], 4096)


@given(st.integers(20, 5000), st.integers(4, 19), st.integers(1, 40))
def test_even_windows_lie_in_the_stream(length: int, window: int, most: int) -> None:
    stream = np.arange(length)
    windows = tokens.even_windows(stream, window, most)
    assert 1 <= len(windows) <= most
    assert windows.shape[1] == window + 1
    assert (np.diff(windows) == 1).all()
    assert windows.max() < length


def test_prompts_to_write_from(tales: list[corpus.Tale]) -> None:
    stream = tokens.stream_of(encode, tales, 100)
    dice = random.Random(1)
    plain = outputs.prompts_for(stream, None, encode)
    assert {len(plain(dice)) for _ in range(40)} == {5, 9, 17, 25}
    with_requests = [outputs.prompts_for(stream, Tasks(tales), encode)(dice) for _ in range(40)]
    assert all(prompt[0] == 0 for prompt in with_requests)
    assert 0 < sum(1 in prompt for prompt in with_requests) < 30


def test_finished_stages_are_not_done_again(tmp_path: Path) -> None:
    first = workspace.Workspace(tmp_path / "work")
    assert first.begin("target", {"steps": 3, "text": "a"})
    assert first.begin("target", {"steps": 3, "text": "a"}), "it began, and did not finish"
    first.finish("target")
    second = workspace.Workspace(tmp_path / "work")
    assert second.finished("target")
    assert not second.finished("draft")
    assert not second.begin("target", {"steps": 3, "text": "a"})
    with pytest.raises(workspace.InputError, match=r"stage target in .* began with steps = 3, not 4"):
        second.begin("target", {"steps": 4, "text": "a"})


def test_a_damaged_workspace(tmp_path: Path) -> None:
    (tmp_path / "stages.json").write_text("{")
    with pytest.raises(workspace.InputError, match="damaged"):
        workspace.Workspace(tmp_path)


def test_files_are_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("old")
    with contextlib.suppress(KeyboardInterrupt), workspace.replacing(path) as part:
        part.write_text("half")
        raise KeyboardInterrupt
    assert path.read_text() == "old"
    with workspace.replacing(path) as part:
        part.write_text("new")
    assert path.read_text() == "new"


def test_when_to_save_and_when_to_stop() -> None:
    now = 0.0
    stop = workspace.Stop(minutes=10, every_s=60, clock=lambda: now)
    assert not stop.save_due()
    now = 61.0
    assert stop.save_due()
    assert not stop.save_due()
    now = 600.0
    assert stop.requested
    assert stop.save_due()
    assert not workspace.Stop(clock=lambda: 1e9).requested


def test_signals_ask_to_stop() -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        stop = workspace.Stop()
        stop.listen()
        assert not stop.requested
        signal.raise_signal(signal.SIGTERM)
        assert stop.requested
        assert stop.save_due()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_the_rate_climbs_and_falls() -> None:
    plan = training.Plan(name="target", steps=400, rate=1e-3, patience=100, seed=0)
    rates = [training.learning_rate(plan, step) for step in range(400)]
    assert rates[0] < rates[20] < rates[39]
    assert rates[60] > rates[200] > rates[399] > 0.9e-4
    assert max(rates) <= 1e-3


def test_training_ends_where_validation_has_stopped_falling() -> None:
    falling = [(50, 4.0), (100, 3.0), (150, 3.5)]
    assert not training.gives_up(falling, 100)
    assert training.gives_up([*falling, (200, 3.1)], 100)
    assert not training.gives_up([*falling, (200, 3.1)], None)


def test_either_draft_and_depths() -> None:
    first, second = np.array([1, 1, 0, 0], bool), np.array([1, 0, 1, 0], bool)
    assert report.union([first, second]).tolist() == [True, True, True, False]
    assert [report.distinct(tokens) for tokens in ([1, 2, 3, 4, 5], [1] * 7, [1, 2])] == [1.0, 0.25, 0.0]
    assert report.in_a_row([first, second]) == [0.5, 0.5]
    assert report.in_a_row([~first & first, second]) == [0.0, 0.0]


@pytest.mark.parametrize("name", ["quote", "edit", "chat", "tale"])
def test_which_passage_a_prompt_asks_for(name: str) -> None:
    prompt = (ROOT / "prompts" / f"{name}.txt").read_text(encoding="utf-8").removesuffix("\n")
    expected = report.expected_reply(prompt)
    if name == "quote":
        assert expected is not None
        assert f": {expected}{corpus.TURN_END}" in prompt
    elif name == "edit":
        assert expected is not None
        assert expected.startswith("There was once a queen who had a garden")
        assert "king" not in expected
    else:
        assert expected is None


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "scripts.models.train_demo_pair", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)


def test_a_stage_that_does_not_exist(tmp_path: Path) -> None:
    done = run("text.txt", tmp_path, "--stages", "target,drafts")
    assert done.returncode == 2
    assert "no stage 'drafts'" in done.stderr


def test_help_names_the_stages() -> None:
    shown = train_demo_pair.parser().format_help()
    assert all(stage in shown.replace("\n", "").replace(" ", "") for stage in workspace.STAGES)


def test_one_line_for_a_missing_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "import sys; sys.modules['torch'] = None; from scripts.models import train_demo_pair as t; sys.exit(t.main())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "text.txt", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r"train_demo_pair: not installed: try `pip install .*torch.*`\n", done.stderr)


def test_a_target_begins_with_heads_that_copy() -> None:
    torch = pytest.importorskip("torch")
    from scripts.models.demo_pair import induction, llama, pipeline

    torch.manual_seed(0)
    model = llama.Model.new(pipeline.TARGET(vocabulary=2048))
    induction.install(model)
    passage = torch.randint(2048, (1, 200))
    with torch.no_grad():
        best = llama.logits(model, torch.cat((passage, passage), 1)).argmax(-1)
    assert (best[0, 200:-1] == passage[0, 1:]).float().mean() > 0.8


def test_the_whole_training_interrupted_and_continued(tmp_path: Path) -> None:
    """Every stage, in a few steps; a run that is stopped on and on ends with the same files as one that is not."""
    pytest.importorskip("torch")
    pytest.importorskip("tokenizers")
    text = tmp_path / "tales.txt"
    text.write_text("\n".join(f"{line} {i}" for i in range(6) for line in LINES), encoding="utf-8")
    steps = [f"--{name}-steps=2" for name, _ in train_demo_pair.STEPS]
    options = [*steps, "--samples=66", "--window=32"]
    whole = run(text, tmp_path / "a", *options)
    assert whole.returncode == 0, whole.stderr
    codes = [3]
    while codes[-1] == 3 and len(codes) < 20:
        codes.append(run(text, tmp_path / "b", *options, "--minutes=0.0001").returncode)
    assert codes[-1] == 0
    assert len(codes) > 6
    for role in ("target", "draft", "draft-2", "eagle3"):
        a, b = ((tmp_path / name / f"tales-{role}.gguf").read_bytes() for name in "ab")
        assert a == b, role
    assert json.loads((tmp_path / "a" / "work" / "stages.json").read_text())["head"]["finished"]
    assert "agreement along" in (tmp_path / "a" / "work" / "report.txt").read_text()

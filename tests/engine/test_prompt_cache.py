"""Prompt caches of whole jobs: texts are those of jobs without one, whatever the ranks find in their files."""

from __future__ import annotations

import contextlib
import json
import resource
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from support import in_process
from support.architectures import write
from support.commands import SPLITS, TARGET, ggpipe, mpirun
from support.long_text import SAMPLING, Tokens, alone, words
from support.pipeline import local_session
from support.requests import asked
from support.zoo import ZOO, make

from ggpipe.channel.client import ClientRequest
from ggpipe.config.context import ContextConfig
from ggpipe.config.draft import DraftConfig
from ggpipe.config.engine import EngineConfig, PromptCacheConfig, Saves
from ggpipe.config.layer_split import LayerSplit
from ggpipe.config.model import ModelConfig
from ggpipe.config.pipeline import PipelineConfig
from ggpipe.config.speculation import SpeculationConfig
from ggpipe.engine.session import Session
from ggpipe.stats.records import RequestStats

PROMPTS = Path(__file__).parents[2] / "prompts"
DRAFT = TARGET.with_name("tales-draft.gguf")
N_CTX, N_PREDICT = 512, 12


@contextlib.contextmanager
def loaded(
    path: Path, shares: Sequence[float] = (1.0,), draft: int | None = None, saves: Saves = "prompt"
) -> Iterator[Session]:
    """`draft`: the number of its ranks."""
    context = ContextConfig(n_ctx=N_CTX, n_ubatch=32, n_seq=2, exact=True)
    drafts: tuple[DraftConfig, ...] = ()
    if draft is not None:
        drafts = (
            DraftConfig(
                model=ModelConfig(path=DRAFT),
                context=context,
                layer_split=LayerSplit((1.0,) * draft) if draft else None,
            ),
        )
    config = EngineConfig(
        model=ModelConfig(path=TARGET),
        context=context,
        pipeline=PipelineConfig(layer_split=LayerSplit((*shares,)), threads=(1,)),
        drafts=drafts,
        cache_prompt=False,
        prompt_cache=PromptCacheConfig(path, saves),
    )
    with local_session(config, len(shares) + (draft or 0)) as session:
        yield session


def generate(session: Session, prompt: Tokens) -> RequestStats:
    """Its text must be libllama's. The draft, if there is one, is waited for."""
    return served(session, prompt).stats


def served(session: Session, prompt: Tokens) -> ClientRequest:
    """As `generate`: the whole request."""
    speculation = SpeculationConfig(mode="speculative" if session.can_speculate else "iterative", n_parallel=2)
    request = session.begin(asked(prompt, SAMPLING, N_PREDICT, speculation))
    assert [token.id for token in session.tokens(request)] == alone(prompt, N_PREDICT)
    return request


def cached(path: Path, prompt: Tokens, shares: Sequence[float] = (1.0,), draft: int | None = None) -> int:
    """Tokens that a job does not compute, which has nothing to complain about."""
    with loaded(path, shares, draft) as session:
        assert session.warnings == ()
        request = served(session, prompt)
        assert request.ended is not None
        assert request.ended.not_saved == ()
    return request.stats.counters.cached_tokens


@pytest.mark.parametrize(("shares", "draft"), [((1.0,), None), ((1.0,), 0), ((0.5, 0.5), 1), ((0.4, 0.3, 0.3), 1)])
def test_the_same_text_with_what_an_earlier_job_computed(
    shares: tuple[float, ...], draft: int | None, tmp_path: Path
) -> None:
    path, prompt = tmp_path / "cache", words()[:150]
    assert cached(path, prompt, shares, draft) == 0
    n_files = len(shares) + (draft is not None)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [
        "cache",
        *(f"cache.rank{i}" for i in range(1, n_files)),
    ]
    before = path.stat().st_mtime_ns
    assert cached(path, prompt, shares, draft) == 149
    assert cached(path, prompt[:100], shares, draft) == 99
    assert path.stat().st_mtime_ns == before, "there was nothing to write"
    assert cached(path, (*prompt[:70], *words()[200:230]), shares, draft) == 70
    assert cached(path, (*prompt[:70], *words()[200:260]), shares, draft) == 99


def test_the_draft_takes_up_its_prefix_as_well(tmp_path: Path) -> None:
    prompt, n_rows = words()[:150], []
    for _ in range(2):
        with loaded(tmp_path / "cache", draft=0) as session:
            stats = generate(session, prompt)
            session.idle(0.2)  # its last runs
        n_rows.append(sum(run.n_rows for run in stats.draft_runs))
    assert n_rows[0] > n_rows[1] + 100


def test_a_whole_text_is_kept_and_gone_on_with(tmp_path: Path) -> None:
    path, prompt = tmp_path / "cache", words()[:60]
    with loaded(path, (0.5, 0.5), 1, saves="text") as session:
        generate(session, prompt)
    text = (*prompt, *alone(prompt, N_PREDICT))
    assert cached(path, (*text, *words()[80:90]), (0.5, 0.5), 1) == len(text) - 1


def test_a_cache_that_is_only_read(tmp_path: Path) -> None:
    path, prompt = tmp_path / "cache", words()[:60]
    with loaded(path, saves="nothing") as session:
        generate(session, prompt)
    assert not path.exists()


def test_files_that_do_not_fit_together(tmp_path: Path) -> None:
    path, prompt = tmp_path / "cache", words()[:80]
    part = tmp_path / "cache.rank1"
    cached(path, prompt[:50], (0.5, 0.5))
    old = part.read_bytes()
    cached(path, prompt, (0.5, 0.5))
    part.write_bytes(old)
    assert cached(path, prompt, (0.5, 0.5)) == 49, "the shorter one counts"
    part.unlink()
    with loaded(path, (0.5, 0.5)) as session:
        (warning,) = map(str, session.warnings)
        assert warning.startswith("rank 1 (")
        assert warning.endswith(") has no prompt cache, others have: the prompt is computed anew")
        assert generate(session, prompt).counters.cached_tokens == 0
    part.write_bytes(old[:-100])
    with loaded(path, (0.5, 0.5)) as session:
        (warning,) = map(str, session.warnings)
        assert warning.startswith("rank 1 (")
        assert warning.endswith(f"prompt cache {part}: it is cut off; the prompt is computed anew")
        assert generate(session, prompt).counters.cached_tokens == 0
    assert cached(path, prompt, (0.5, 0.5)) == 79


def test_a_full_disk_costs_no_text(tmp_path: Path) -> None:
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    with loaded(tmp_path / "cache", (0.5, 0.5)) as session:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limit[1]))
        try:
            ended = served(session, words()[:60]).ended
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        assert ended is not None
        assert len(ended.not_saved) == 2
        assert all("cannot write the prompt cache" in line for line in ended.not_saved)
    assert not list(tmp_path.iterdir())


GREEDY = ("generate", "-m", TARGET, "-n", 20, "-c", 512, "-t", 1, "--temp", 0, "--exact")


def test_from_the_command_line(tmp_path: Path) -> None:
    text = (PROMPTS / "tale.txt").read_text().strip()
    cache_file = ("--prompt-cache", tmp_path / "cache", "--json", tmp_path / "json")
    arguments = (*GREEDY, "-p", text, "-md", DRAFT, *cache_file)
    expected = in_process.output(*GREEDY, "-p", text)
    for n_cached in (False, True):
        result = ggpipe(*arguments, *SPLITS[2])
        assert (result.returncode, result.stdout) == (0, expected), result.stderr
        assert ("cached" in result.stderr) == n_cached
        assert "warning" not in result.stderr
    written = json.loads((tmp_path / "json").read_text())
    assert written["cached_tokens"] == written["n_prompt_tokens"] - 1
    result = mpirun(3, *arguments)
    assert (result.returncode, result.stdout) == (0, expected), result.stderr
    assert result.stderr.count("it was written with layers 1-4 of 8, not 1-3 of 8; the prompt is computed anew") == 1


@pytest.mark.parametrize("n", [1, 2])
def test_bad_paths(n: int, tmp_path: Path) -> None:
    result = in_process.ggpipe_on_threads(
        *GREEDY, "-p", "Once", "--prompt-cache", tmp_path / "none" / "cache", *SPLITS[n]
    )
    assert result.returncode == 2
    assert f"--prompt-cache {tmp_path}/none/cache" in result.stderr
    assert f"there is no directory {tmp_path}/none" in result.stderr
    assert len(result.stderr.splitlines()) == 1
    (tmp_path / "notes").write_text("notes")
    result = in_process.ggpipe_on_threads(*GREEDY, "-p", "Once", "--prompt-cache", tmp_path / "notes", *SPLITS[n])
    assert result.returncode == 2
    assert "it is no prompt cache of ggpipe, and would be overwritten; name another file\n" in result.stderr
    assert len(result.stderr.splitlines()) == 1
    result = in_process.ggpipe_on_threads(*GREEDY, "-p", "Once", "--prompt-cache-ro", *SPLITS[n])
    assert result.returncode == 2
    assert "--prompt-cache-ro needs a file: name it with --prompt-cache" in result.stderr


@pytest.mark.parametrize("name", ["gemma3", "jamba", "deepseek4"])
def test_sliding_windows_and_recurrent_models(name: str, tmp_path: Path) -> None:
    path = (make if name in ZOO else write)(name, tmp_path / "model.gguf")
    text = "the quick brown fox jumps over the lazy dog and runs away from all of the other animals in the wood"
    arguments = ("generate", "-m", path, "-n", 20, "-c", 512, "-t", 1, "--temp", 0, "--exact", *SPLITS[2])
    for more in ("", "", " for ever"):
        cache_file = ("--prompt-cache", tmp_path / "cache", "--json", tmp_path / "json")
        result = in_process.ggpipe_on_threads(*arguments, "-p", text + more, *cache_file)
        assert result.returncode == 0, result.stderr
        assert result.stdout == in_process.ggpipe_on_threads(*arguments, "-p", text + more).stdout
    assert "cached" in result.stderr

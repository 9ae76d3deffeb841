"""README and docs: their commands run, their links lead somewhere, and the names in them exist."""

from __future__ import annotations

import doctest
import functools
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from support import in_process, planning
from support.commands import HANG_S, ROOT, TARGET, ggpipe, output
from support.hub_server import hub_server

from ggpipe.launch import mpirun

DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *ROOT.glob("prompts/*.md"), *ROOT.glob("ggpipe/models/*.md")])
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
README = (ROOT / "README.md").read_text()
DRAFT = TARGET.with_name("tales-draft.gguf")


@pytest.fixture(scope="module", autouse=True)
def shorter_outputs(full: bool) -> Iterator[None]:
    with planning.shorter_outputs(full):
        yield


def blocks(page: str) -> list[str]:
    """The fenced blocks of a page."""
    return re.findall(r"^```\w*\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)


def prose(page: str) -> str:
    """A page without what is code or output."""
    text = re.sub(r"^```.*?^```", "", (ROOT / page).read_text(), flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"`[^`\n]*`", "", text)


def commands(*pages: str) -> list[str]:
    """The lines of blocks that start ggpipe, without comments."""
    text = "\n".join(block for page in pages for block in blocks(page))
    lines = (line.partition(" #")[0].strip() for line in text.replace("\\\n", "").splitlines())
    return [line for line in lines if re.match(r"(\.venv/bin/)?ggpipe [a-z]+ ", line)]


def run(*words: object, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """`ggpipe WORDS`, in this process where it starts no ranks."""
    is_simulated = words[0] == "simulate" or (words[0] == "plan" and "--hostfile" not in words)
    starts_ranks = not is_simulated and any(flag in words for flag in ("--hostfile", "--mpi-layer-split", "-r"))
    return (ggpipe if starts_ranks else in_process.ggpipe)(*words, cwd=cwd)


@functools.cache
def once(*words: str) -> subprocess.CompletedProcess[str]:
    """The same; several pages show the same command."""
    return run(*words)


GENERATE, GENERATE_IN_DOCS = (
    [line for line in commands(*pages) if "ggpipe generate" in line]
    for pages in (("README.md",), ("docs/generate.md", "docs/plan.md"))
)
TUTORIAL = [block.strip() for block in blocks("docs/tutorial.md") if block.startswith("ggpipe ")]
TOOLS = [
    line
    for line in commands("README.md", "docs/plan.md", "docs/simulate.md", "docs/profile.md", "docs/bench.md")
    if "ggpipe generate" not in line and "ggpipe chat" not in line and "ggpipe serve" not in line
]
CHAT = sorted({line for line in commands("README.md", "docs/chat.md") if "ggpipe chat" in line and "-hf " not in line})
FROM_HUB = sorted({line for line in commands("README.md", "docs/models.md") if "chat -hf " in line})


def put_in(words: list[str], places: Mapping[str, object]) -> list[str]:
    """Words of a command line; values of these flags are replaced."""
    return [str(places.get(before, word)) for before, word in zip(["", *words], words, strict=False)]


def hosts_for_three(folder: Path) -> Path:
    """A hostfile, as the mpirun that is here reads it."""
    is_hydra = "--map-by" not in mpirun.mpirun_command(mpirun.find_mpirun(), 1, None, ())
    (folder / "hosts").write_text("localhost:3\n" if is_hydra else "localhost slots=3\n")
    return folder / "hosts"


def of_one_prompt(receipt: Path, folder: Path) -> Path:
    """The same receipt, with the runs of its first prompt alone."""
    content = json.loads(receipt.read_text())
    content["runs"] = [run for run in content["runs"] if run["prompt"] == content["runs"][0]["prompt"]]
    (folder / receipt.name).write_text(json.dumps(content))
    return folder / receipt.name


def test_the_readme_starts_with_two_commands() -> None:
    scripts = [block.strip() for block in blocks("README.md") if block.startswith("./scripts/")]
    assert scripts == ["./scripts/demo", "./scripts/test"]
    for script in scripts:
        assert (ROOT / script).stat().st_mode & 0o111


def test_the_pages_show_commands() -> None:
    assert len([line for line in commands("README.md") if "ggpipe generate" in line]) == 4
    assert {line.split()[1] for line in TOOLS} == {"doctor", "plan", "simulate", "profile", "record", "bench"}
    assert len(FROM_HUB) == 2
    assert {line.split()[1] for line in TUTORIAL} == {"generate", "plan", "simulate", "profile", "record", "bench"}


@pytest.mark.parametrize("command", [*GENERATE, *GENERATE_IN_DOCS])
def test_a_command(command: str, tmp_path: Path) -> None:
    """README's commands start ranks as they do for users; ranks of the docs' commands are threads."""
    places = {"-m": TARGET, "-md": DRAFT, "-f": ROOT / "prompts" / "tale.txt", "--hostfile": hosts_for_three(tmp_path)}
    places["--prompt-cache"] = tmp_path / "prompt.cache"
    start = run if command in GENERATE else in_process.ggpipe_on_threads
    result = start(*put_in(shlex.split(command)[1:], places), "-n", 8, "-t", 1, "--seed", 1)
    assert result.returncode == 0, result.stderr
    is_held = not {"--grammar", "-j"}.isdisjoint(shlex.split(command))  # to a form, which may be a short one
    assert len(result.stdout) > (1 if is_held else 10)
    assert is_held or "decode" in result.stderr


@pytest.mark.parametrize("command", CHAT)
def test_a_conversation(command: str) -> None:
    """Its commands, with one question: there is no terminal."""
    words = put_in(shlex.split(command)[1:], {"-m": TARGET, "-md": DRAFT})
    assert len(output(*words, "-p", "Tell me a tale.", "-n", 8, "-t", 1, "--temp", 0)) > 10


@pytest.mark.parametrize("command", FROM_HUB)
def test_a_model_from_the_hub(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command downloads the bundled models, under the names that it asks for, from a Hub on this machine."""
    monkeypatch.setenv("LLAMA_CACHE", str(tmp_path))
    words = shlex.split(command)[1:]
    named = {flag: words[words.index(flag) + 1].partition(":") for flag in ("-hf", "-hfd") if flag in words}
    with hub_server() as hub:
        for (flag, (repo, _, quant)), model in zip(named.items(), (TARGET, DRAFT), strict=False):
            hub.repos[repo] = {f"{flag[1:]}-{quant}.gguf": model.read_bytes()}
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        assert len(output(*words, "-p", "Tell me a tale.", "-n", 8, "-t", 1, "--temp", 0)) > 10


def test_what_to_expect() -> None:
    """The speeds in the table are those that its commands simulate."""
    rows = re.findall(r"^\| .* \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| `ggpipe (simulate .*)` \|$", README, re.MULTILINE)
    assert len(rows) == 3
    for *speeds, command in rows:
        printed = re.search(r"^t/s +(.*)$", once(*command.split()).stdout, re.MULTILINE)
        assert printed is not None, command
        simulated = [float(word) for word in printed[1].split()]
        assert simulated == [pytest.approx(float(speed), rel=0.1) for speed in speeds], command


def test_the_tools(tmp_path: Path, full: bool) -> None:
    """What one command writes, another reads."""
    places = {"-m": TARGET, "-md": DRAFT, "--hostfile": hosts_for_three(tmp_path)}
    written = {"-o", "--csv", "--plot", "--recording", "--receipt"}
    shorter: dict[str, tuple[object, ...]] = {
        "bench": ("-n", 4, "--rounds", 1, "--modes", "iterative,async", "-t", 1),
        "profile": ("--seconds", 1, "-t", 1),
        "record": ("-n", 8, "-t", 1),
        "simulate": (),
        "doctor": (),
        "plan": (),
    }
    several: dict[str, dict[str, tuple[object, ...]]] = {
        "--receipt": {"bench": ("-n", 4, "--rounds", 1, "--seconds", 0.5, "-t", 1)},
        "--drafters": {"plan": ("--mode", "iterative"), "simulate": ("-n", 16)},
        "--users": {"plan": ("--mode", "iterative"), "simulate": ("-n", 16)},
        "--sweep": {"simulate": ("-n", 16)},
        "--hostfile": {} if full else {"plan": ("--mode", "iterative", "--seconds", 1, "-t", 1)},
    }
    order = sorted(
        dict.fromkeys(TOOLS), key=lambda line: "profile.json -m" in line
    )  # the profile comes before who reads it
    for command in order:
        words = shlex.split(command)[1:]
        if "--against" in words and not full:
            places["--against"] = of_one_prompt(ROOT / words[words.index("--against") + 1], tmp_path)
        words = put_in(words, places)
        files = {w for before, w in zip(["", *words], words, strict=False) if before in written} | {"profile.json"}
        words = [str(tmp_path / word) if word in files else word for word in words]
        own = (wanted[words[0]] for flag, wanted in several.items() if flag in words and words[0] in wanted)
        more = next(own, shorter[words[0]])
        result = once(*words, *map(str, more))
        assert result.returncode == 0, (command, result.stderr)


def test_the_tutorial(tmp_path: Path, full: bool) -> None:
    """Its commands run as they stand, one after the other, in a folder of its own. Without --full, they measure for a
    second."""
    (tmp_path / "prompts").symlink_to(ROOT / "prompts")
    (tmp_path / "ggpipe").mkdir()
    (tmp_path / "ggpipe" / "models").symlink_to(ROOT / "ggpipe" / "models")
    for command in TUTORIAL:
        words = shlex.split(command)[1:]
        result = run(*(words if full else put_in(words, {"--seconds": 1})), cwd=tmp_path)
        assert result.returncode == 0, (command, result.stderr)
    texts = re.findall(r"^ - \"Take the third.*$", (DOCS / "tutorial.md").read_text(), re.MULTILINE)
    assert len(set(texts)) == 1, "every split and mode writes the same text, and so does the tutorial"


def masked(text: str) -> Iterator[str]:
    """Lines of output; figures and gaps may change, labels may not."""
    for line in text.splitlines():
        if line.strip():
            yield re.sub(r"\s+", " ", re.sub(r"<?\d[\d.,]*( ?(ms|µs|s|[GMk]?B|%)\b)?", "#", line)).strip()


def form(line: str) -> str:
    """A line of a plan without flags, and without how many stages and groups there are."""
    line = re.sub(r" (--\S+|-pa)( [^\s-]\S*)?| best$", "", line)
    return re.sub(r"# (stages|groups?)( of # (# )*and # ranks| of #)?,?", "# stages", line)


@pytest.mark.parametrize(
    ("page", "command"),
    [
        ("README.md", "ggpipe plan qwen3-235b-xeons"),
        ("docs/plan.md", "ggpipe plan nodes4-gigabit"),
        ("docs/simulate.md", "ggpipe simulate nodes8-gigabit --draft 3"),
        ("docs/tutorial.md", "ggpipe simulate nodes8-gigabit --draft 3"),
    ],
)
def test_simulated_output(page: str, command: str, full: bool) -> None:
    """The block after a command shows what it prints. Without --full, a plan of short outputs may have other settings
    and numbers of groups."""
    shown = blocks(page)
    after = shown[[block.strip() for block in shown].index(command) + 1]
    result = once(*command.split()[1:])
    assert result.returncode == 0, result.stderr
    is_whole = full or "plan" not in command
    printed, wanted = ({line if is_whole else form(line) for line in masked(text)} for text in (result.stdout, after))
    assert wanted <= printed


def test_options_that_pages_name_exist() -> None:
    help_text = "".join(
        in_process.ggpipe(command, "--help-all", COLUMNS="200").stdout
        for command in ("generate", "plan", "simulate", "profile", "record", "bench")
    )
    pages = ("README.md", *(f"docs/{name}.md" for name in ("generate", "plan", "simulate", "profile", "bench")))
    named = {option for page in pages for option in re.findall(r"`(-{1,2}[a-z][a-z-]*)", (ROOT / page).read_text())}
    assert {option for option in named if option.rstrip("-") not in help_text} == set()


@functools.cache
def anchors(page: Path) -> set[str]:
    """The ids that a reader's browser makes of a page's headings."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(name: str) -> Iterator[str]:
    """Links of a page that lead to no file or heading here."""
    page = ROOT / name
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(name)):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            yield f"{name}: {link}"


def test_links() -> None:
    assert [link for name in NAMES for link in broken_links(name)] == []


def test_names_that_the_glossary_explains_exist() -> None:
    table = (DOCS / "glossary.md").read_text().partition("## Names in the code")[2].partition("\n## ")[0]
    names = re.findall(r"`([A-Z]\w+)`", table)
    assert names
    source = "\n".join(path.read_text() for path in (ROOT / "ggpipe").rglob("*.py"))
    assert [name for name in names if not re.search(rf"^class {name}\b", source, re.MULTILINE)] == []


def test_batch_scripts() -> None:
    """The shell reads the batch files of the cluster guide."""
    scripts = [block for block in blocks("docs/cluster.md") if "$SLURM" in block or block.startswith("#!")]
    assert len(scripts) == 2
    for script in scripts:
        done = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")


def test_the_cluster_file(tmp_path: Path) -> None:
    """The example of a cluster file can be simulated, with a profile in its place."""
    (file,) = [block for block in blocks("docs/simulate.md") if block.startswith("title =")]
    (tmp_path / "cluster.toml").write_text(file)
    profile = run("profile", "-m", TARGET, "-t", 1, "--seconds", 1, "-o", tmp_path / "office.json")
    assert profile.returncode == 0, profile.stderr
    result = run("simulate", tmp_path / "cluster.toml", "-md", DRAFT, "-n", 8)
    assert result.returncode == 0, result.stderr


def test_the_python_examples(tmp_path: Path) -> None:
    """They are whole programs."""
    programs = [
        block for block in blocks("docs/python.md") if block.startswith(("import", "from")) and ">>>" not in block
    ]
    assert len(programs) == 2
    for program in programs:
        (tmp_path / "tale.py").write_text(program.replace("ggpipe/models/", f"{TARGET.parent}/"))
        result = subprocess.run(
            [sys.executable, tmp_path / "tale.py"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=HANG_S,
            check=False,
        )
        assert (result.returncode, result.stderr) == (0, "")
        assert len(result.stdout) > 10


def test_the_python_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    failed, tried = doctest.testfile(str(ROOT / "docs" / "python.md"), module_relative=False)
    assert (failed, tried > 10) == (0, True)


def test_the_workflow_and_the_hooks_run_what_is_here() -> None:
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    assert "run: .ci/run" in workflow
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    check = (ROOT / "scripts" / "check").read_text()
    entries = re.findall(r"entry: (.*)", hooks)
    assert entries
    for entry in entries:
        assert entry in check, "scripts/check runs the same"

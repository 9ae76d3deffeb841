"""All commands: their help, and the records of settings that each has options for."""

from __future__ import annotations

from ggpipe.config.context import ContextConfig
from ggpipe.config.draft import DraftConfig
from ggpipe.config.engine import EngineConfig
from ggpipe.config.model import ModelConfig
from ggpipe.config.pipeline import PipelineConfig
from ggpipe.config.sampling import SamplingConfig
from ggpipe.config.speculation import SpeculationConfig
from ggpipe.options import settings
from ggpipe.options.chat import ChatSettings
from ggpipe.options.doctor import DoctorSettings
from ggpipe.options.grammar import Constraint
from ggpipe.options.hub import HubSettings
from ggpipe.options.option import Command
from ggpipe.options.server import ServerConfig

_WEIGHTS = (settings.ModelSettings, HubSettings, settings.LoadSettings, ModelConfig, settings.LoraSettings)
_COMPUTING = (ContextConfig, PipelineConfig, settings.RankSettings, DraftConfig, settings.LogSettings)
_PLANNED = frozenset(
    {"layer_split", "draft.threads_batch", "restart", "check_memory", "send_weights", "tensor_split", "tensor_wire"}
)
_OF_HUB = frozenset({"hf_repo", "hf_file", "hf_token", "offline", "draft.hf_repo"})
_OF_REASONING = frozenset({"reasoning_budget", "reasoning_budget_message"})

COMMON = frozenset(
    {
        "cluster", "model", "hf_repo", "draft.model", "draft.hf_repo", "host", "port", "n_slots", "api_key",
        "prompt", "file", "system", "single_turn", "n_predict", "n_ctx", "threads", "layer_split", "layouts",
        "hostfile", "restart", "n_ranks", "users", "mode", "modes", "rounds", "spec_type", "temp", "top_p",
        "top_k", "seed", "grammar", "json_schema", "acceptance", "recording", "csv", "json", "plots", "input",
        "output", "format", "doctor_json", "doctor_report", "seconds", "tiny", "verbose", "receipt", "against",
    }
)  # fmt: skip
"""Names of the options that --help shows; --help-all shows all."""

COMMANDS: tuple[Command, ...] = (
    Command(
        name="generate",
        help="""Generate text from a prompt, on one rank or many.

        With --mpi-layer-split, ggpipe starts the ranks itself. It also works under mpirun or srun, and without MPI on
        one rank. The output goes to stdout, everything else to stderr.
        """,
        records=(
            *_WEIGHTS,
            *_COMPUTING,
            settings.PromptSettings,
            ChatSettings,
            settings.PromptCacheFile,
            SpeculationConfig,
            SamplingConfig,
            Constraint,
            settings.DisplaySettings,
            settings.GenerateOutput,
        ),
        required=frozenset({"model"}),
        reads_variables=True,
    ),
    Command(
        name="chat",
        help="""Chat with a model in the terminal.

        Ctrl-C stops an answer, Ctrl-D quits, /help lists the commands. -p or -f asks the first question. If stdin is
        not a terminal, ggpipe reads a single question from it (and appends it to that of -p), and writes the answer to
        stdout. Ranks that die are restarted up to three times in ten minutes, and the answer continues.
        """,
        records=(
            *_WEIGHTS,
            *_COMPUTING,
            settings.PromptSettings,
            ChatSettings,
            SpeculationConfig,
            SamplingConfig,
            settings.DisplaySettings,
            settings.ChatOutput,
        ),
        leave_out=frozenset({"single_turn"}),
        required=frozenset({"model"}),
        reads_variables=True,
        defaults={"restart": 3},
    ),
    Command(
        name="batch",
        help="""Answer a file of prompts, several at a time.

        To resume an interrupted job, start it again with the same OUT. A prompt that cannot be answered gets an error
        in OUT; the others are still answered, and the exit code is 1. Settings in a prompt's own body take precedence
        over the command line.
        """,
        records=(
            *_WEIGHTS,
            *_COMPUTING,
            EngineConfig,
            settings.PromptSettings,
            ChatSettings,
            SpeculationConfig,
            SamplingConfig,
            Constraint,
            settings.EmbeddingSettings,
            settings.DisplaySettings,
            settings.BatchSettings,
        ),
        leave_out=frozenset({"prompt", "file", "escape", "slot_save_path"}),
        required=frozenset({"model", "input", "output"}),
        defaults={"n_requests": 4},
    ),
    Command(
        name="record",
        help="""Record a draft model's candidates for each token of the target's output, for `ggpipe simulate`.

        The target generates the output without a draft, on the ranks of --mpi-layer-split. Then the draft model reads
        it on the first rank.
        """,
        records=(*_WEIGHTS, *_COMPUTING, settings.PromptSettings, SamplingConfig, settings.RecordSettings),
        leave_out=frozenset({"file", "draft.window", *_OF_REASONING}),
        required=frozenset({"model", "output"}),
        defaults={"n_predict": 256},
    ),
    Command(
        name="simulate",
        help="""Simulate `generate` on a cluster: the same scheduler and drafters, on virtual time.

        Without --mode, all three modes are simulated. The models are those of the cluster file, or of the GGUF files
        named by -m and -md, of which only the headers are read.
        """,
        records=(
            settings.ClusterSettings,
            settings.ModelSettings,
            HubSettings,
            settings.SimulatedText,
            settings.SimulatedDrafters,
            settings.SimulatedTraffic,
            ContextConfig,
            PipelineConfig,
            settings.RankSettings,
            DraftConfig,
            SpeculationConfig,
            settings.SimulateSettings,
        ),
        leave_out=frozenset(
            {
                "send_weights",
                "threads_batch",
                "flash_attn",
                "fast_kernels",
                "exact",
                "rope_scaling",
                "rope_scale",
                "rope_freq_base",
                "rope_freq_scale",
                "yarn_orig_ctx",
                "yarn_ext_factor",
                "yarn_attn_factor",
                "yarn_beta_slow",
                "yarn_beta_fast",
                "hostfile",
                "rank_timeout_s",
                "launch_timeout_s",
                "restart",
                "check_memory",
                "draft.threads_batch",
            }
        ),
        required=frozenset({"cluster"}),
    ),
    Command(
        name="pairs",
        help="""Tell which draft models and EAGLE-3 heads fit a target model.

        Reads only the headers of -m or -hf and of each -md and -hfd: tokenizers and vocabularies must agree, and a head
        must have the target's width. The exit code is 1 if none fits.
        """,
        records=(settings.ModelSettings, HubSettings),
        required=frozenset({"model"}),
    ),
    Command(
        name="plan",
        help="""Find the fastest way to run a model on a cluster: layers per machine, place of the draft model, flags.

        Without CLUSTER, ggpipe first measures the machines of --hostfile, or this one. Memory is calculated from the
        model's header, speed is predicted by short simulations. Of several -md, the plan uses none, one or more. The
        last line of the output is a command to copy.
        """,
        records=(
            settings.ClusterSettings,
            *_WEIGHTS,
            *_COMPUTING,
            settings.SimulatedText,
            settings.SimulatedDrafters,
            settings.PlanSettings,
        ),
        leave_out=_PLANNED | {"n_predict", "seed"},
    ),
    Command(
        name="profile",
        help="""Measure how fast ranks compute a model's layers, their memory, and the links between them.

        Under mpirun or srun, all ranks are measured. Otherwise ggpipe starts them: those of --hostfile, or -r ranks on
        this machine. A table goes to stderr. With -md, each rank also measures the whole draft model, with the same
        threads.
        """,
        records=(*_WEIGHTS, *_COMPUTING, settings.ProfileSettings),
        leave_out=_PLANNED | {"draft.threads", "draft.window"},
        required=frozenset({"model"}),
    ),
    Command(
        name="bench",
        help="""Compare the speed of all modes. They take turns in one job, with the same prompts and the same seed.

        Models are loaded once. Each mode warms up before the first round. Ctrl-C ends the benchmark and shows the
        results so far. Several --mpi-layer-split compare layouts, in the fastest mode or in those of --modes.
        """,
        records=(
            *_WEIGHTS,
            *_COMPUTING,
            settings.PromptSettings,
            SpeculationConfig,
            SamplingConfig,
            settings.DisplaySettings,
            settings.BenchSettings,
        ),
        leave_out=frozenset({"prompt", "file", "mode", "ignore_eos", "restart", "layer_split", "stop", *_OF_REASONING}),
        required=frozenset({"model"}),
        defaults={"n_predict": 128, "seed": 1},
    ),
    Command(
        name="demo",
        help="""Watch a bundled model write a tale: two ranks hold its layers, a third runs the draft model.

        Its beginning is then written again without the draft model and with it, in turn, to compare the speeds. The
        first demo inflates the bundled models with zeros, to the cost of large ones: 454 MB in the cache folder, of
        which 37 MB take up disk space. `ggpipe demo -n 400 -s 7 --temp 0.8` writes a longer, different tale.
        """,
        records=(
            settings.LoadSettings,
            ModelConfig,
            *_COMPUTING,
            settings.PromptSettings,
            SpeculationConfig,
            SamplingConfig,
            settings.DisplaySettings,
            settings.GenerateOutput,
            settings.DemoSettings,
        ),
        leave_out=frozenset({"override_kv", "restart", *_OF_REASONING}),
        defaults={
            "n_predict": 120,
            "n_ctx": 1024,
            "threads": "1",
            "layer_split": "0.5,0.5/1.0",
            "temp": 0.0,
            "seed": 1,
        },
    ),
    Command(
        name="serve",
        help="""Serve OpenAI's and llama-server's APIs over HTTP, for several requests at a time.

        ggpipe starts the ranks, and restarts those that die (--restart); streams continue where they stopped. Under
        mpirun or srun, this process is one of the ranks, and the first one serves. The port is open at once; /health
        returns 503 until the model is loaded. Sampling flags are the defaults for requests that don't set them.
        SIGTERM stops the server once the running requests are answered.
        """,
        records=(
            *_WEIGHTS,
            *_COMPUTING,
            ServerConfig,
            settings.EmbeddingSettings,
            settings.PromptSettings,
            ChatSettings,
            EngineConfig,
            SpeculationConfig,
            SamplingConfig,
            Constraint,
        ),
        leave_out=frozenset({"prompt", "file", "escape", "single_turn", "system", "n_requests", "n_parallel"}),
        required=frozenset({"model"}),
        reads_variables=True,
        defaults={"restart": 10, "warmup": True},
    ),
    Command(
        name="doctor",
        help="""Check the machines of a run before it starts, all at the same time.

        Give it the --hostfile and the model flags of the run. A line per machine says what is wrong and which command
        mends it: ssh, software, MPI, models, memory, threads, limits, clock, links and ports. The exit code is 1 if a
        run would fail.
        """,
        records=(*_WEIGHTS, *_COMPUTING, DoctorSettings),
        leave_out=frozenset({"restart", "rank_timeout_s", "check_memory"}),
    ),
    Command(name="facts", help="Print what this machine has, for `ggpipe doctor` on another one.", hidden=True),
    Command(
        name="rank", help="Run as a rank that a front end has started, with the settings that it passes.", hidden=True
    ),
)

ENGINE = Command(
    name="engine",
    help="Settings that a Python program passes to an engine, and a server to its ranks.",
    records=(
        *_WEIGHTS,
        *_COMPUTING,
        settings.PromptSettings,
        settings.PromptCacheFile,
        EngineConfig,
        SpeculationConfig,
        SamplingConfig,
        Constraint,
    ),
    leave_out=frozenset({"prompt", "file", "escape", *_OF_HUB}),
    required=frozenset({"model"}),
    defaults={"n_requests": 4},
)
"""Not a command of the program."""

"""All commands: which records of settings each has, and its help."""

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
from ggpipe.options.grammar import Constraint
from ggpipe.options.option import Command
from ggpipe.options.server import ServerConfig

_WEIGHTS = (settings.ModelSettings, settings.LoadSettings, ModelConfig, settings.LoraSettings)
_COMPUTING = (ContextConfig, PipelineConfig, settings.RankSettings, DraftConfig, settings.LogSettings)
_OF_REASONING = frozenset({"reasoning_budget", "reasoning_budget_message"})

COMMANDS: tuple[Command, ...] = (
    Command(
        name="generate",
        help="""Continue a prompt with a model whose layers are spread over ranks.

        Works under mpirun or srun, alone with --mpi-layer-split (mpirun is started for you), and on one rank without
        MPI. The text goes to stdout, everything else to stderr.
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
            settings.GenerateOutput,
        ),
        required=frozenset({"model"}),
        reads_variables=True,
    ),
    Command(
        name="chat",
        help="""Talk with a model whose layers are spread over ranks.

        Ctrl-C stops an answer, Ctrl-D leaves, /help lists the commands. With -p or -f, the first question is asked
        already. Without a terminal on stdin, what comes from there is one question (behind that of -p), whose answer
        goes to stdout. Ranks that die are started again, three times in ten minutes, and the answer goes on.
        """,
        records=(
            *_WEIGHTS,
            *_COMPUTING,
            settings.PromptSettings,
            ChatSettings,
            SpeculationConfig,
            SamplingConfig,
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

        An interrupted job goes on when it is started again with the same OUT. A prompt that cannot be answered has an
        error there; the others are answered, and the exit code is 1. Settings in a prompt's own body come before those
        of the command line.
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
            settings.BatchSettings,
        ),
        leave_out=frozenset({"prompt", "file", "escape", "slot_save_path"}),
        required=frozenset({"model", "input", "output"}),
        defaults={"n_requests": 4},
    ),
    Command(
        name="record",
        help="""Record a draft model's candidates for each token of the target's text, for `ggpipe simulate`.

        The target alone writes the text, on as many ranks as --mpi-layer-split names. The draft reads it in the first
        rank.
        """,
        records=(*_WEIGHTS, *_COMPUTING, settings.PromptSettings, SamplingConfig, settings.RecordSettings),
        leave_out=frozenset({"file", *_OF_REASONING}),
        required=frozenset({"model", "output"}),
        defaults={"n_predict": 256},
    ),
    Command(
        name="simulate",
        help="""Simulate `generate` on a cluster: the same scheduler and draft logic, on virtual time.

        Without --mode all three modes are simulated. Models come from the cluster file, or with -m and -md from the
        headers of GGUF files.
        """,
        records=(
            settings.ClusterSettings,
            settings.ModelSettings,
            settings.SimulatedText,
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
                "threads_batch",
                "flash_attn",
                "fast_attention",
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
                "restart",
                "check_memory",
                "draft.threads_batch",
            }
        ),
        required=frozenset({"cluster"}),
    ),
    Command(
        name="plan",
        help="""Find the fastest way to run a model on a cluster: layers of each machine, place of the draft, flags.

        Without CLUSTER the machines of --hostfile, or this one, are measured first. Memory comes from the model's
        header, speeds from short simulations. The last line is a command to paste.
        """,
        records=(settings.ClusterSettings, *_WEIGHTS, *_COMPUTING, settings.SimulatedText, settings.PlanSettings),
        leave_out=frozenset(
            {
                "layer_split",
                "n_predict",
                "seed",
                "draft.threads_batch",
                "restart",
                "check_memory",
                "tensor_split",
                "tensor_wire",
            }
        ),
    ),
    Command(
        name="profile",
        help="""Measure how fast ranks compute a model's layers, their memory, and the links between them.

        Under mpirun or srun on all ranks at once; else it starts them: those of --hostfile, or -r ranks on this
        machine. A table goes to stderr. Without --layers a quarter of the layers is measured, or as many as the time
        allows. With -md each rank also measures all of the draft, with the same threads.
        """,
        records=(*_WEIGHTS, *_COMPUTING, settings.ProfileSettings),
        leave_out=frozenset(
            {
                "layer_split",
                "draft.threads",
                "draft.threads_batch",
                "restart",
                "check_memory",
                "tensor_split",
                "tensor_wire",
            }
        ),
        required=frozenset({"model"}),
    ),
    Command(
        name="bench",
        help="""Measure all modes side by side: they take turns in one job, with the same prompts and the same seed.

        Models are loaded once. Each mode warms up, then the rounds follow. Ctrl-C ends the bench and shows the results
        so far. With several --mpi-layer-split, layouts are compared in the fastest mode, or in those of --modes.
        """,
        records=(
            *_WEIGHTS,
            *_COMPUTING,
            settings.PromptSettings,
            SpeculationConfig,
            SamplingConfig,
            settings.BenchSettings,
        ),
        leave_out=frozenset({"prompt", "file", "mode", "ignore_eos", "restart", "layer_split", "stop", *_OF_REASONING}),
        required=frozenset({"model"}),
        defaults={"n_predict": 128, "seed": 1},
    ),
    Command(
        name="demo",
        help="""Watch a bundled model write a tale: two ranks hold its layers, a third runs the draft model.

        A part of the tale is written a second time without the draft model, to compare the speeds. The first demo
        inflates the bundled models to the cost of large ones, with zeros: 447 MB in the cache folder, of which 33 MB
        take space on the disk. `ggpipe demo -n 400 -s 7 --temp 0.8` writes a longer, other tale.
        """,
        records=(
            settings.LoadSettings,
            ModelConfig,
            *_COMPUTING,
            settings.PromptSettings,
            SpeculationConfig,
            SamplingConfig,
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
        help="""Serve OpenAI's API and llama-server's over HTTP, several requests at a time.

        The ranks are started here, and started again when they die (--restart): streams go on where they were. Under
        mpirun or srun this process is one of the ranks, and the first one answers. The port answers at once, /health
        with 503 until the model is loaded. Sampling flags are for requests that do not say otherwise. SIGTERM ends it
        when the running requests are answered.
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
    Command(name="rank", help="Be a rank that a front end started, with the settings that it gives.", hidden=True),
)

ENGINE = Command(
    name="engine",
    help="What a Python program gives an engine, and a server its ranks.",
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
    leave_out=frozenset({"prompt", "file", "escape"}),
    required=frozenset({"model"}),
    defaults={"n_requests": 4},
)
"""No command of the program."""

"""All options, as a table over the records that hold settings (`config/`, `options/settings.py`).

A row is the field that an option sets, its flags, and its help. The field's type and default are the record's. The
table has the order of --help; `docs/flags.md` is made from it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ggpipe.config.context import ContextConfig
from ggpipe.config.draft import DraftConfig
from ggpipe.config.engine import EngineConfig
from ggpipe.config.model import ModelConfig
from ggpipe.config.pipeline import PipelineConfig
from ggpipe.config.samplers import samplers_by_letter
from ggpipe.config.sampling import SamplingConfig
from ggpipe.config.speculation import SpeculationConfig
from ggpipe.core.drafters import registry
from ggpipe.options import lists, sampling
from ggpipe.options.chat import ChatSettings, json_object
from ggpipe.options.grammar import Constraint
from ggpipe.options.option import Option
from ggpipe.options.server import ServerConfig
from ggpipe.options.settings import (
    BatchSettings,
    BenchSettings,
    ChatOutput,
    ClusterSettings,
    DemoSettings,
    EmbeddingSettings,
    GenerateOutput,
    LoadSettings,
    LogSettings,
    LoraSettings,
    ModelSettings,
    PlanSettings,
    ProfileSettings,
    PromptCacheFile,
    PromptSettings,
    RankSettings,
    RecordSettings,
    SimulatedText,
    SimulatedTraffic,
    SimulateSettings,
)

MODEL, SERVER, PROMPT, COMPUTE, RANKS, SPECULATION, SAMPLING, ROPE, OUTPUT = PANELS = (
    "Model", "Server", "Prompt", "Compute", "Ranks", "Speculation", "Sampling", "RoPE and YaRN", "Output",
)  # fmt: skip
"""Panels of --help, in this order."""


def _option(
    record: type,
    panel: str,
    field: str,
    *flags: str,
    help: str,
    metavar: str | None = None,
    parse: Callable[[Any], Any] | None = None,
    many: bool = False,
    optional: bool = False,
    setting: str = "",
    variable: str = "",
) -> Option:
    return Option(
        record=record, field=field, flags=flags, panel=panel, help=help, metavar=metavar, parse=parse, many=many,
        optional=optional, setting=setting, variable=variable,
    )  # fmt: skip


def of_model(field: str, help: str) -> str:
    """The help of a setting that the model's file may recommend."""
    default = getattr(SamplingConfig, field)
    text = ";".join(default) if isinstance(default, tuple) else f"{default:g}"
    return f"{help} Default: the model's own, else {text}."


# One option a line reads better than five.
# fmt: off
OPTIONS: tuple[Option, ...] = (
    _option(ClusterSettings, MODEL, "path", metavar="CLUSTER", setting="cluster", help="Cluster file, the name of a bundled one, or a profile."),

    _option(ModelSettings, MODEL, "target", "-m", "--model", setting="model", metavar="FILE", variable="LLAMA_ARG_MODEL", help="GGUF file of the target model; of a split file, its first part."),
    _option(LoadSettings, MODEL, "load_mode", "-lm", "--load-mode", metavar="MODE", variable="LLAMA_ARG_LOAD_MODE", help="How weights are loaded: auto, none, mmap, mlock, mmap+mlock or dio."),
    _option(LoadSettings, MODEL, "mmap", "--mmap/--no-mmap", help="Map weights from the file, or read this rank's layers into memory."),
    _option(LoadSettings, MODEL, "mlock", "--mlock", help="Lock weights in RAM."),
    _option(ModelConfig, MODEL, "repack", "--repack/--no-repack", " /-nr", variable="LLAMA_ARG_REPACK", help="Let ggml repack weights for this CPU."),
    _option(ModelConfig, MODEL, "numa", "--numa", metavar="TYPE", variable="LLAMA_ARG_NUMA", help="NUMA strategy: distribute (also without a value), isolate or numactl."),
    _option(ModelConfig, MODEL, "override_kv", "--override-kv", metavar="KEY=TYPE:VALUE", many=True, help="Override a metadata value of the model. May be repeated."),
    _option(LoraSettings, MODEL, "plain", "--lora", setting="loras", metavar="FILE", many=True, help="Apply a LoRA adapter. May be repeated."),
    _option(LoraSettings, MODEL, "scaled", "--lora-scaled", setting="lora_scaled", metavar="FILE:SCALE", many=True, parse=lists.scaled_loras, help="Apply a LoRA adapter with a scale. May be repeated."),
    _option(ProfileSettings, MODEL, "layers", "--layers", metavar="A-B", parse=lists.layers, help="Layers to measure, both included. Default: some of them."),
    _option(DemoSettings, MODEL, "tiny", "--tiny", help="Take the bundled models as they are: messages take longer than computing, and nothing is written to the cache."),

    _option(ServerConfig, SERVER, "host", "--host", metavar="HOST", variable="LLAMA_ARG_HOST", help="Address to listen on; 0.0.0.0: all of this machine's."),
    _option(ServerConfig, SERVER, "port", "--port", metavar="PORT", variable="LLAMA_ARG_PORT", help="Port to listen on; 0: any that is free."),
    _option(ServerConfig, SERVER, "n_slots", "-np", "--parallel", metavar="N", variable="LLAMA_ARG_N_PARALLEL", help="Requests that are served at the same time; further ones wait. They share the context."),
    _option(ServerConfig, SERVER, "n_waiting", "--max-waiting", metavar="N", help="Requests that wait beyond those of -np; further ones are answered with 503 and Retry-After."),
    _option(ServerConfig, SERVER, "alias", "-a", "--alias", metavar="NAME", variable="LLAMA_ARG_ALIAS", help="What clients call the model. Default: the name of its file."),
    _option(ServerConfig, SERVER, "api_key", "--api-key", metavar="KEY", variable="LLAMA_API_KEY", help="Answer only requests that have this key; several are separated by commas."),
    _option(ServerConfig, SERVER, "api_key_file", "--api-key-file", metavar="FILE", variable="LLAMA_ARG_API_KEY_FILE", help="More keys, one a line."),
    _option(ServerConfig, SERVER, "ssl_key_file", "--ssl-key-file", metavar="FILE", variable="LLAMA_ARG_SSL_KEY_FILE", help="Private key for HTTPS, PEM."),
    _option(ServerConfig, SERVER, "ssl_cert_file", "--ssl-cert-file", metavar="FILE", variable="LLAMA_ARG_SSL_CERT_FILE", help="Certificate for HTTPS, PEM."),
    _option(ServerConfig, SERVER, "cors_origins", "--cors-origins", metavar="LIST", parse=lists.words, variable="LLAMA_ARG_CORS_ORIGINS", help="Pages of other servers that may use this one, by origin (https://a.org,http://b.org:3000); localhost: all of this machine; *: all. Default: * with API keys, else localhost."),
    _option(ServerConfig, SERVER, "static_path", "--path", metavar="FOLDER", variable="LLAMA_ARG_STATIC_PATH", help="Answer with this folder's files instead of the page. They need no API key."),
    _option(ServerConfig, SERVER, "webui", "--webui/--no-webui", "--ui/--no-ui", variable="LLAMA_ARG_UI", help="Answer / with the page."),
    _option(ServerConfig, SERVER, "api_prefix", "--api-prefix", metavar="PREFIX", variable="LLAMA_ARG_API_PREFIX", help="What all paths begin with, as in /llm."),
    _option(ServerConfig, SERVER, "n_http_threads", "--threads-http", metavar="N", variable="LLAMA_ARG_THREADS_HTTP", help="Taken for llama-server's users, and not used: one event loop answers all clients."),
    _option(ServerConfig, SERVER, "timeout_s", "-to", "--timeout", metavar="S", variable="LLAMA_ARG_TIMEOUT", help="Seconds that a client may take to send a request, and that running requests may go on after SIGTERM."),
    _option(ServerConfig, SERVER, "sse_ping_interval_s", "--sse-ping-interval", metavar="S", variable="LLAMA_ARG_SSE_PING_INTERVAL", help="Seconds after which a stream without news sends a comment, so that nobody takes it for dead; -1: never."),
    _option(ServerConfig, SERVER, "max_body_mib", "--max-body", metavar="MIB", help="Size of a request's body, at most."),
    _option(ServerConfig, SERVER, "log_file", "--log-file", metavar="FILE", variable="LLAMA_ARG_LOG_FILE", help="Write the log to this file, too: a line for each request. A file that logrotate moved away is made anew."),
    _option(ServerConfig, SERVER, "log_format", "--log-format", metavar="text|json", help="Lines of the log: for people, or each a JSON object (--log-jsonl is short for it)."),
    _option(ServerConfig, SERVER, "log_disable", "--log-disable", help="Log nothing on stderr but why the server ends."),
    _option(ServerConfig, SERVER, "slots", "--slots/--no-slots", variable="LLAMA_ARG_ENDPOINT_SLOTS", help="Answer GET /slots: what each of the -np requests does."),
    _option(EngineConfig, SERVER, "slot_save_path", "--slot-save-path", metavar="FOLDER", help="Folder for what POST /slots saves of conversations, and restores: a file of each rank, on its own machine."),
    _option(ServerConfig, SERVER, "keep_slots", "--keep-slots", help="Save all slots in --slot-save-path when the server ends, and restore them when it starts."),
    _option(ServerConfig, SERVER, "metrics", "--metrics", variable="LLAMA_ARG_ENDPOINT_METRICS", help="Answer /metrics, for Prometheus."),
    _option(ServerConfig, SERVER, "jinja", "--jinja/--no-jinja", variable="LLAMA_ARG_JINJA", help="Read chat templates as Jinja. They always are."),
    _option(ServerConfig, SERVER, "embeddings", "--embedding", "--embeddings", variable="LLAMA_ARG_EMBEDDINGS", help="Taken for llama-server's users, and not used: embeddings are answered beside texts."),
    _option(ServerConfig, SERVER, "reasoning_format", "--reasoning-format", metavar="auto|deepseek|none", variable="LLAMA_ARG_THINK", help="Answer what the model thinks as reasoning_content (auto, deepseek), or as a part of the content (none)."),

    _option(BatchSettings, PROMPT, "input", metavar="IN", setting="input", help="File of prompts: a line for each; a list of texts in JSON, as SpecInfer takes it; or lines in JSON of OpenAI's batch format."),
    _option(BatchSettings, PROMPT, "format", "--format", metavar="KIND", help="Format of IN: lines, specinfer or openai. Default: what it looks like."),
    _option(PromptSettings, PROMPT, "text", "-p", "--prompt", setting="prompt", metavar="TEXT", help="Text to continue."),
    _option(PromptSettings, PROMPT, "file", "-f", "--file", metavar="FILE", help="Read the prompt from a file."),
    _option(PromptSettings, PROMPT, "escape", "--escape/--no-escape", "-e/ ", help=r"Process \n, \t, \xHH … in the prompt."),
    _option(PromptSettings, PROMPT, "n_predict", "-n", "--predict", "--n-predict", metavar="N", variable="LLAMA_ARG_N_PREDICT", help="Tokens to generate; -1: until the text ends or the context is full."),
    _option(ChatSettings, PROMPT, "single_turn", "-st", "--single-turn", help="Take the prompt as a user's message: the model's chat template makes a conversation of it, which the model answers."),
    _option(ChatSettings, PROMPT, "system", "-sys", "--system-prompt", metavar="TEXT", help="Instructions to the model, before the user's message."),
    _option(ChatSettings, PROMPT, "template", "--chat-template", setting="chat_template", metavar="JINJA", variable="LLAMA_ARG_CHAT_TEMPLATE", help="Chat template instead of the model's own; or chatml, which models without one get."),
    _option(ChatSettings, PROMPT, "template_file", "--chat-template-file", setting="chat_template_file", metavar="FILE", variable="LLAMA_ARG_CHAT_TEMPLATE_FILE", help="Read the chat template from a file."),
    _option(ChatSettings, PROMPT, "template_kwargs", "--chat-template-kwargs", setting="chat_template_kwargs", metavar="JSON", parse=json_object, optional=True, variable="LLAMA_ARG_CHAT_TEMPLATE_KWARGS", help='Further names for the chat template: {"enable_thinking": false}.'),
    _option(PromptCacheFile, PROMPT, "path", "--prompt-cache", setting="prompt_cache", metavar="FILE", help="Keep what is computed of the prompt in a file, and take from it what the prompt begins with. Each rank has its own, with its own layers: FILE, FILE.rank1, ..."),
    _option(PromptCacheFile, PROMPT, "all", "--prompt-cache-all", setting="prompt_cache_all", help="Keep the generated text as well; the file is written at the end."),
    _option(PromptCacheFile, PROMPT, "read_only", "--prompt-cache-ro", setting="prompt_cache_ro", help="Read the prompt cache, and do not write it."),
    _option(EngineConfig, PROMPT, "cache_prompt", "--cache-prompt/--no-cache-prompt", variable="LLAMA_ARG_CACHE_PROMPT", help="Keep what ended requests computed, for prompts that begin alike."),
    _option(EmbeddingSettings, PROMPT, "pooling", "--pooling", metavar="none|mean|cls|last", variable="LLAMA_ARG_POOLING", help="How embeddings are made of the hidden states of a text's tokens: each token's, the mean, the first one, the last one. Default: as the model's file says."),
    _option(EmbeddingSettings, PROMPT, "embd_normalize", "--embd-normalize", metavar="N", help="How embeddings are normalized: 2 to length 1, 1 to a sum of 1, -1 not at all, 0 to 32760 as the largest number, above 2 by the p-norm."),
    _option(SimulatedText, PROMPT, "n_predict", "-n", "--predict", "--n-predict", metavar="N", help="Tokens to generate; -1: 256, or as many as were recorded."),
    _option(SimulatedText, PROMPT, "prompt_tokens", "--prompt-tokens", metavar="N", help="Tokens of the prompt."),
    _option(SimulatedText, PROMPT, "acceptance", "--acceptance", metavar="P", help="Probability that the draft's best candidate is the target's token. Default: 0.7."),
    _option(SimulatedText, PROMPT, "confidence", "--confidence", metavar="KIND", help="Whether the draft's probabilities are calibrated, overconfident or underconfident; never-right: it is as confident, and always wrong."),
    _option(SimulatedText, PROMPT, "recording", "--recording", metavar="FILE", help="Use prompts, texts and candidates that `ggpipe record` wrote, instead of random ones."),
    _option(SimulatedTraffic, PROMPT, "users", "--users", metavar="N", help="Simulate N users who ask at the same time, and again when they are answered."),
    _option(SimulatedTraffic, PROMPT, "rate", "--rate", metavar="R", help="Simulate requests that arrive at random, R a second."),
    _option(SimulatedTraffic, PROMPT, "requests", "--requests", metavar="N", help="Number of requests. Default: 2 for each user, or 32 at a rate. Without users or a rate they arrive together."),
    _option(SimulatedTraffic, PROMPT, "arrivals", "--arrivals", metavar="FILE", help="Requests from a file, one a line: second of arrival, prompt tokens, tokens to generate, as CSV or JSON."),
    _option(SimulatedTraffic, PROMPT, "concurrent", "--concurrent", metavar="N", help="Requests that are served at the same time; further ones wait. Default: one for each user, or 4."),
    _option(SimulatedText, PROMPT, "seed", "-s", "--seed", metavar="N", help="Seed of the random text."),
    _option(BenchSettings, PROMPT, "files", "-f", "--file", metavar="FILE", many=True, help="Read a prompt from a file. May be repeated. Default: the bundled prompts."),
    _option(BenchSettings, PROMPT, "rounds", "--rounds", metavar="N", help="Rounds; in each round every mode runs once for each prompt."),
    _option(BenchSettings, PROMPT, "full_length", "--ignore-eos/--no-ignore-eos", help="Never end a text before -n tokens."),
    _option(RecordSettings, PROMPT, "files", "-f", "--file", metavar="FILE", many=True, help="Read a prompt from a file. May be repeated."),

    _option(ContextConfig, COMPUTE, "n_ctx", "-c", "--ctx-size", metavar="N", variable="LLAMA_ARG_CTX_SIZE", help="Context size in tokens; 0: the model's own."),
    _option(EngineConfig, COMPUTE, "warmup", "--warmup/--no-warmup", help="Take the memory of all KV cells while loading; else each takes its own when it is used first."),
    _option(EngineConfig, COMPUTE, "n_requests", "--concurrent", metavar="N", help="Requests that are served at the same time; further ones wait. They share the context."),
    _option(ContextConfig, COMPUTE, "n_batch", "-b", "--batch-size", metavar="N", variable="LLAMA_ARG_BATCH", help="Prompt tokens in a batch, at most."),
    _option(ContextConfig, COMPUTE, "n_ubatch", "-ub", "--ubatch-size", metavar="N", variable="LLAMA_ARG_UBATCH", help="Prompt tokens in a run, at most. Several stages get shorter runs, which keep all of them busy."),
    _option(PipelineConfig, COMPUTE, "threads", "-t", "--threads", metavar="LIST", parse=lists.numbers, variable="LLAMA_ARG_THREADS", help="Threads; one value, or one for each rank (6,32,20). -1: the machine's cores."),
    _option(PipelineConfig, COMPUTE, "threads_batch", "-tb", "--threads-batch", metavar="LIST", parse=lists.numbers, help="Threads for prompts; one value, or one for each rank. -1: as -t."),
    _option(ContextConfig, COMPUTE, "flash_attn", "-fa", "--flash-attn", metavar="on|off|auto", variable="LLAMA_ARG_FLASH_ATTN", help="Flash attention."),
    _option(ContextConfig, COMPUTE, "fast_attention", "--fast-attention/--no-fast-attention", help="Flash attention of ggpipe's own: faster than ggml's, equal but for rounding. Needs AVX2 and f16 KV cells; elsewhere, and with --exact, ggml's."),
    _option(ContextConfig, COMPUTE, "cache_type_k", "-ctk", "--cache-type-k", metavar="TYPE", variable="LLAMA_ARG_CACHE_TYPE_K", help="KV cache type of K: f32, f16, bf16, q8_0, q4_0, q4_1, iq4_nl, q5_0 or q5_1."),
    _option(ContextConfig, COMPUTE, "cache_type_v", "-ctv", "--cache-type-v", metavar="TYPE", variable="LLAMA_ARG_CACHE_TYPE_V", help="KV cache type of V, as -ctk."),
    _option(PipelineConfig, COMPUTE, "check_memory", "--check-memory", help="Load nothing when a machine's available memory is less than its ranks need. --restart does so for layers that go to other machines."),
    _option(ContextConfig, COMPUTE, "exact", "--exact", help="Reference kernels: the same bits for every split, mode and number of threads. Slower."),

    _option(RankSettings, RANKS, "layer_split", "--mpi-layer-split", metavar="LIST", optional=True, parse=lists.layer_split, help="Share of the layers for each rank, head first (0.1,0.4,0.5); SHARE*N: N ranks compute these layers together, as a group (0.5*2,0.5*2); draft ranks behind a slash (0.5,0.5/1.0), those of each further draft model behind another. Without mpirun, that many ranks are started. auto: planned after a quick measurement. Default: even."),
    _option(BenchSettings, RANKS, "layouts", "--mpi-layer-split", metavar="LIST", many=True, help="As above. May be repeated: the layouts are compared. Each is loaded on ranks of its own, and they take turns."),
    _option(PipelineConfig, RANKS, "tensor_split", "-ts", "--tensor-split", metavar="LIST", parse=lists.weights, help="In which proportions the ranks of a group divide each tensor (3,1): in every group of so many ranks; others divide evenly."),
    _option(PipelineConfig, RANKS, "tensor_wire", "--tensor-wire", metavar="f32|f16", help="What the machines of a group send each other of their sums; f16: half the bytes, rounded."),
    _option(PipelineConfig, RANKS, "rank_timeout_s", "--rank-timeout", metavar="S", help="End the job when a rank sends nothing for so many seconds; 0: never."),
    _option(RankSettings, RANKS, "restart", "--restart", metavar="N", help="Start ranks that died again, at most N times in ten minutes: the text goes on where it was. Layers of a machine that cannot be reached go to the others."),
    _option(RankSettings, RANKS, "hostfile", "--hostfile", metavar="FILE", help="Machines to start ranks on, in mpirun's format. Default: those of the Slurm job, or this one."),
    _option(ProfileSettings, RANKS, "n_ranks", "-r", "--ranks", metavar="N", help="Ranks to start. Default: the slots of --hostfile, or one."),
    _option(PlanSettings, RANKS, "users", "--users", metavar="N", help="Plan for N users at the same time: for most tokens per second of all of them together."),
    _option(PlanSettings, RANKS, "n_ranks", "-r", "--ranks", metavar="N", help="Ranks to use, the draft's included. Default: the fastest number."),

    _option(ModelSettings, SPECULATION, "drafts", "-md", "--model-draft", "--spec-draft-model", setting="draft.model", metavar="FILE", many=True, variable="LLAMA_ARG_SPEC_DRAFT_MODEL", help="GGUF file of a draft model: a smaller one of the same family. It runs on the ranks behind the / of --mpi-layer-split, else inside the first rank. May be repeated: all of them draft, each on the ranks behind its own /."),
    _option(SpeculationConfig, SPECULATION, "mode", "--mode", metavar="MODE", optional=True, help="async: drafting and verifying overlap (default with -md). speculative: draft, verify, repeat. iterative: no draft tokens."),
    _option(SpeculationConfig, SPECULATION, "drafters", "--spec-type", setting="spec_type", metavar="LIST", optional=True, parse=registry.read_names, variable="LLAMA_ARG_SPEC_TYPE", help=f"What drafts, separated by commas: {', '.join((*registry.WITH_MODEL, *registry.WITHOUT_MODEL))}, or none. Several draft for one tree. draft: the draft model. ngram: repeats what followed the same tokens before, in this request or another one; needs no model. Default with -md: draft,ngram."),
    _option(PlanSettings, SPECULATION, "mode", "--mode", metavar="MODE", help="Plan for this mode alone: async, speculative or iterative. Default: the fastest."),
    _option(SpeculationConfig, SPECULATION, "policy", "--policy", metavar="POLICY", help="How draft trees grow in async mode. best-first: by the probability of each path, as wide as further rows are cheap. thresholds: PipeInfer's, by -ps, -pr, -pd and -np, each of which chooses it."),
    _option(SpeculationConfig, SPECULATION, "n_draft", "--draft", "--draft-max", "--draft-n", "--spec-draft-n-max", metavar="N", variable="LLAMA_ARG_SPEC_DRAFT_N_MAX", optional=True, help="Draft tokens in a micro-batch, and in a run, at most. Default: 64 with --policy best-first, else 8."),
    _option(SpeculationConfig, SPECULATION, "n_min", "--draft-min", "--spec-draft-n-min", metavar="N", variable="LLAMA_ARG_SPEC_DRAFT_N_MIN", help="Draft tokens in a micro-batch, at least: smaller ones are not sent."),
    _option(SpeculationConfig, SPECULATION, "p_accept", "-pa", "--p-accept", "--draft-p-min", "--spec-draft-p-min", metavar="P", variable="LLAMA_ARG_SPEC_DRAFT_P_MIN", help="End a branch where the draft's best candidate is less probable than this."),
    _option(SpeculationConfig, SPECULATION, "p_split", "-ps", "--p-split", "--draft-p-split", "--spec-draft-p-split", metavar="P", variable="LLAMA_ARG_SPEC_DRAFT_P_SPLIT", help="Split a branch where a further candidate is at least this probable."),
    _option(SpeculationConfig, SPECULATION, "p_recovery", "-pr", "--p-recovery", metavar="P", help="Raise -pa and -ps by this for each micro-batch since the last accepted token."),
    _option(SpeculationConfig, SPECULATION, "p_decay", "-pd", "--p-decay", metavar="P", help="Lower -pa and -ps by this for each attempt since the last accepted token that drafted nothing."),
    _option(SpeculationConfig, SPECULATION, "n_parallel", "-np", "--parallel", metavar="N", help="Branches that are drafted side by side, with --policy thresholds."),
    _option(ServerConfig, SPECULATION, "n_branches", "--branches", metavar="N", help="Branches that are drafted side by side, as -np of other commands: above 1, --policy thresholds is used."),
    _option(SpeculationConfig, SPECULATION, "n_draft_rows", "--draft-rows", metavar="N", help="Rows in a run of the draft, at most. Default: 16 with --policy best-first, else as -np."),
    _option(SpeculationConfig, SPECULATION, "n_seq", "--sequences", metavar="N", help="Sequence ids for branches in flight, the output's included. Default: 129 with --policy best-first, where all requests share them; else as -np. More than -np lets new branches go in while older ones are verified."),
    _option(DraftConfig, SPECULATION, "threads", "-td", "--threads-draft", setting="draft.threads", metavar="N", help="Threads of the draft; -1: as -t."),
    _option(DraftConfig, SPECULATION, "threads_batch", "-tbd", "--threads-batch-draft", setting="draft.threads_batch", metavar="N", help="Threads of the draft for prompts; -1: as -td."),
    _option(SpeculationConfig, SPECULATION, "cancel", "--cancel/--no-cancel", help="Stop runs in flight when all their draft tokens are rejected."),
    _option(SpeculationConfig, SPECULATION, "continuous", "--continuous/--no-continuous", help="Keep drafting while earlier draft tokens are verified."),
    _option(BenchSettings, SPECULATION, "modes", "--modes", metavar="LIST", parse=lists.words, help="Modes to measure: iterative, speculative, async, single (the whole model in one process). Default: all that are possible."),

    _option(SamplingConfig, SAMPLING, "samplers", "--samplers", metavar="LIST", parse=sampling.samplers, optional=True, help=of_model("samplers", "Samplers in their order, separated by semicolons or commas; those that are not named are not applied. There are adaptive_p and infill as well.")),
    _option(SamplingConfig, SAMPLING, "samplers", "--sampling-seq", "--sampler-seq", setting="sampling_seq", metavar="LETTERS", optional=True, parse=samplers_by_letter, help="The same in letters, in place of --samplers: edskypmxt is the default."),
    _option(SamplingConfig, SAMPLING, "temp", "--temp", "--temperature", metavar="T", optional=True, variable="LLAMA_ARG_TEMPERATURE", help=of_model("temp", "Temperature; 0 or less: greedy.")),
    _option(SamplingConfig, SAMPLING, "top_k", "--top-k", metavar="N", optional=True, variable="LLAMA_ARG_TOP_K", help=of_model("top_k", "Keep the N most probable tokens; 0: all.")),
    _option(SamplingConfig, SAMPLING, "top_p", "--top-p", metavar="P", optional=True, variable="LLAMA_ARG_TOP_P", help=of_model("top_p", "Keep the most probable tokens that add up to P.")),
    _option(SamplingConfig, SAMPLING, "min_p", "--min-p", metavar="P", optional=True, variable="LLAMA_ARG_MIN_P", help=of_model("min_p", "Keep tokens with at least P times the probability of the most probable one.")),
    _option(SamplingConfig, SAMPLING, "top_n_sigma", "--top-n-sigma", "--top-nsigma", metavar="X", help="Keep tokens whose logit is within X standard deviations of the best one's; 0 or less: all."),
    _option(SamplingConfig, SAMPLING, "typical_p", "--typical", "--typical-p", metavar="P", help="Keep the most typical tokens that add up to P; 1: all."),
    _option(SamplingConfig, SAMPLING, "xtc_probability", "--xtc-probability", metavar="P", optional=True, help=of_model("xtc_probability", "How often XTC leaves out the most probable tokens; 0: never.")),
    _option(SamplingConfig, SAMPLING, "xtc_threshold", "--xtc-threshold", metavar="P", optional=True, help=of_model("xtc_threshold", "XTC leaves out tokens that are at least so probable, but for the last of them; above 0.5: none.")),
    _option(SamplingConfig, SAMPLING, "dynatemp_range", "--dynatemp-range", metavar="X", help="Dynamic temperature: between --temp minus and plus X, by the entropy of the candidates; 0: off."),
    _option(SamplingConfig, SAMPLING, "dynatemp_exponent", "--dynatemp-exp", metavar="X", help="Exponent of the dynamic temperature."),
    _option(SamplingConfig, SAMPLING, "repeat_last_n", "--repeat-last-n", metavar="N", optional=True, help=of_model("repeat_last_n", "Tokens that penalties look back on; 0: off, -1: the whole context.")),
    _option(SamplingConfig, SAMPLING, "repeat_penalty", "--repeat-penalty", metavar="X", optional=True, variable="LLAMA_ARG_REPEAT_PENALTY", help=of_model("repeat_penalty", "Penalise repeated tokens; 1: off.")),
    _option(SamplingConfig, SAMPLING, "presence_penalty", "--presence-penalty", metavar="X", variable="LLAMA_ARG_PRESENCE_PENALTY", help="Penalise tokens that occurred; 0: off."),
    _option(SamplingConfig, SAMPLING, "frequency_penalty", "--frequency-penalty", metavar="X", variable="LLAMA_ARG_FREQUENCY_PENALTY", help="Penalise tokens by how often they occurred; 0: off."),
    _option(SamplingConfig, SAMPLING, "dry_multiplier", "--dry-multiplier", metavar="X", help="DRY: penalise tokens that go on with a repetition; 0: off."),
    _option(SamplingConfig, SAMPLING, "dry_base", "--dry-base", metavar="X", help="DRY: the penalty grows by this factor with each repeated token."),
    _option(SamplingConfig, SAMPLING, "dry_allowed_length", "--dry-allowed-length", metavar="N", help="DRY: tokens that may be repeated without penalty."),
    _option(SamplingConfig, SAMPLING, "dry_penalty_last_n", "--dry-penalty-last-n", metavar="N", help="DRY: tokens in which repetitions are searched; 0: off, -1: the whole context."),
    _option(SamplingConfig, SAMPLING, "dry_sequence_breakers", "--dry-sequence-breaker", metavar="TEXT", many=True, parse=sampling.breakers, help=r"DRY: a text over which no repetition goes on. May be repeated; none: there is no such text. Default: \n, a colon, a double quote and a star."),
    _option(SamplingConfig, SAMPLING, "mirostat", "--mirostat", metavar="N", optional=True, help=of_model("mirostat", "Mirostat 1 or 2, after --temp, in place of all samplers; 0: off.")),
    _option(SamplingConfig, SAMPLING, "mirostat_eta", "--mirostat-lr", metavar="X", optional=True, help=of_model("mirostat_eta", "Learning rate of Mirostat.")),
    _option(SamplingConfig, SAMPLING, "mirostat_tau", "--mirostat-ent", metavar="X", optional=True, help=of_model("mirostat_tau", "Target entropy of Mirostat.")),
    _option(SamplingConfig, SAMPLING, "adaptive_target", "--adaptive-target", metavar="P", help="Probability near which adaptive_p prefers tokens, where --samplers names it; below 0: off."),
    _option(SamplingConfig, SAMPLING, "adaptive_decay", "--adaptive-decay", metavar="X", help="How slowly adaptive_p adapts to what it has drawn, 0 to 0.99."),
    _option(SamplingConfig, SAMPLING, "stop", "-r", "--reverse-prompt", setting="stop", metavar="TEXT", many=True, help="End the text in front of this stop string, where the model writes it. May be repeated."),
    _option(SamplingConfig, SAMPLING, "logit_bias", "-l", "--logit-bias", metavar="TOKEN(+/-)BIAS", many=True, parse=sampling.logit_bias, help="Add a bias to the logit of a token, by its number: 15043+1, or 15043-inf for never. May be repeated."),
    _option(Constraint, SAMPLING, "grammar", "--grammar", metavar="GBNF", help="Hold the text to a grammar, in GBNF."),
    _option(Constraint, SAMPLING, "grammar_file", "--grammar-file", metavar="FILE", help="Read the grammar from a file."),
    _option(Constraint, SAMPLING, "json_schema", "-j", "--json-schema", metavar="SCHEMA", help='Hold the text to a JSON schema; {}: any JSON object.'),
    _option(Constraint, SAMPLING, "json_schema_file", "-jf", "--json-schema-file", metavar="FILE", help="Read the JSON schema from a file."),
    _option(SamplingConfig, SAMPLING, "reasoning_budget", "--reasoning-budget", metavar="N", variable="LLAMA_ARG_THINK_BUDGET", help="Tokens that the model may think before it answers a conversation; behind them the end of its reasoning is written. 0: at once, -1: no limit."),
    _option(SamplingConfig, SAMPLING, "reasoning_budget_message", "--reasoning-budget-message", metavar="TEXT", variable="LLAMA_ARG_THINK_BUDGET_MESSAGE", help="Written in front of that end."),
    _option(SamplingConfig, SAMPLING, "seed", "-s", "--seed", metavar="N", help="Seed; -1: random."),
    _option(SamplingConfig, SAMPLING, "ignore_eos", "--ignore-eos", help="Never end the text before -n tokens."),

    _option(ContextConfig, ROPE, "rope_scaling", "--rope-scaling", metavar="KIND", variable="LLAMA_ARG_ROPE_SCALING_TYPE", help="RoPE scaling: none, linear or yarn. Default: the model's."),
    _option(ContextConfig, ROPE, "rope_scale", "--rope-scale", metavar="X", variable="LLAMA_ARG_ROPE_SCALE", help="Factor that stretches the context; 0: the model's."),
    _option(ContextConfig, ROPE, "rope_freq_base", "--rope-freq-base", metavar="X", variable="LLAMA_ARG_ROPE_FREQ_BASE", help="RoPE base frequency; 0: the model's."),
    _option(ContextConfig, ROPE, "rope_freq_scale", "--rope-freq-scale", metavar="X", variable="LLAMA_ARG_ROPE_FREQ_SCALE", help="RoPE frequency scale, 1 / --rope-scale; 0: the model's."),
    _option(ContextConfig, ROPE, "yarn_orig_ctx", "--yarn-orig-ctx", metavar="N", variable="LLAMA_ARG_YARN_ORIG_CTX", help="Context in tokens that the model was trained with; 0: the model's."),
    _option(ContextConfig, ROPE, "yarn_ext_factor", "--yarn-ext-factor", metavar="X", variable="LLAMA_ARG_YARN_EXT_FACTOR", help="YaRN extrapolation mix; -1: the model's."),
    _option(ContextConfig, ROPE, "yarn_attn_factor", "--yarn-attn-factor", metavar="X", variable="LLAMA_ARG_YARN_ATTN_FACTOR", help="YaRN magnitude scale; -1: the model's."),
    _option(ContextConfig, ROPE, "yarn_beta_slow", "--yarn-beta-slow", metavar="X", variable="LLAMA_ARG_YARN_BETA_SLOW", help="YaRN high correction dimension; -1: the model's."),
    _option(ContextConfig, ROPE, "yarn_beta_fast", "--yarn-beta-fast", metavar="X", variable="LLAMA_ARG_YARN_BETA_FAST", help="YaRN low correction dimension; -1: the model's."),

    _option(GenerateOutput, OUTPUT, "color", "--color", metavar="on|off|auto", help="Live display and colour; off: no colour."),
    _option(ChatOutput, OUTPUT, "color", "--color", metavar="on|off|auto", help="Live display and colour; off: no colour."),
    _option(ChatOutput, OUTPUT, "markdown", "--markdown/--no-markdown", help="Lay out answers on the terminal, each paragraph as soon as it is whole; or show them as the model writes them."),
    _option(GenerateOutput, OUTPUT, "display_prompt", "--display-prompt/--no-display-prompt", help="Show the prompt in the live display."),
    _option(GenerateOutput, OUTPUT, "csv", "--csv", metavar="FILE", help="Append a line: prefill t/s, decode t/s, ITL s, TTFT s."),
    _option(GenerateOutput, OUTPUT, "json", "--json", metavar="FILE", help="Write all measurements."),
    _option(GenerateOutput, OUTPUT, "trace", "--trace", metavar="FILE", help="Write a timeline of all ranks, for Perfetto or chrome://tracing."),
    _option(LogSettings, OUTPUT, "verbose", "-v", "--verbose", help="Show libllama's messages."),
    _option(RecordSettings, OUTPUT, "output", "-o", "--output", metavar="FILE", help="Write the recording, JSON."),
    _option(RecordSettings, OUTPUT, "candidates", "--candidates", metavar="N", help="Candidates of the draft to keep for each token."),
    _option(SimulateSettings, OUTPUT, "sweep", "--sweep", metavar="NAME=VALUES", many=True, help="Simulate with each of these values: draft=2..8, pa=0.05..0.6, np=1,2,4, latency-us=20..200/20. May be repeated: all combinations. Names: draft, draft-min, pa, ps, pr, pd, np, acceptance, prompt-tokens, latency-us, gbit, users, rate, concurrent."),
    _option(SimulateSettings, OUTPUT, "csv", "--csv", metavar="FILE", help="Write the results, a line for each mode and combination of values."),
    _option(SimulateSettings, OUTPUT, "json", "--json", metavar="FILE", help="Write all results and settings."),
    _option(SimulatedTraffic, OUTPUT, "requests_csv", "--requests-csv", metavar="FILE", help="Write a line for each of several requests and each mode."),
    _option(SimulateSettings, OUTPUT, "plot", "--plot", metavar="FILE", help="Draw the speeds of a sweep, or the timeline of one simulation. .png, .svg or .pdf."),
    _option(SimulateSettings, OUTPUT, "trace", "--trace", metavar="FILE", help="Write a timeline of all ranks, for Perfetto or chrome://tracing."),
    _option(ProfileSettings, OUTPUT, "seconds", "--seconds", metavar="S", help="Seconds to measure, without the time to load."),
    _option(ProfileSettings, OUTPUT, "output", "-o", "--output", metavar="FILE", help="Write the profile, JSON; - is stdout."),
    _option(PlanSettings, OUTPUT, "seconds", "--seconds", metavar="S", help="Seconds to measure, where no cluster is given."),
    _option(PlanSettings, OUTPUT, "json", "--json", metavar="FILE", help="Write the plan."),
    _option(BatchSettings, OUTPUT, "output", "-o", "--output", metavar="OUT", help="Write the answers as they come. What is answered there is not answered again."),
    _option(BatchSettings, OUTPUT, "output_format", "--output-format", metavar="KIND", help="Format of OUT: openai, or specinfer, which is written when all is answered."),
    _option(BatchSettings, OUTPUT, "color", "--color", metavar="on|off|auto", help="Progress and colour; off: no colour."),
    _option(BenchSettings, OUTPUT, "color", "--color", metavar="on|off|auto", help="Progress and colour; off: no colour."),
    _option(BenchSettings, OUTPUT, "csv", "--csv", metavar="FILE", help="Write a line for each run: prefill t/s, decode t/s, ITL s, TTFT s, mode, round, prompt."),
    _option(BenchSettings, OUTPUT, "json", "--json", metavar="FILE", help="Write all measurements."),
    _option(BenchSettings, OUTPUT, "plots", "--plots", metavar="FOLDER", help="Draw speed, TTFT, ITL, a timeline, and acceptance by position."),
    _option(BenchSettings, OUTPUT, "plot_format", "--plot-format", metavar="svg|png|pdf", help="Format of --plots."),
    _option(BenchSettings, OUTPUT, "trace", "--trace", metavar="FOLDER", help="Write the timeline of each mode's median run, for Perfetto or chrome://tracing."),
)
# fmt: on

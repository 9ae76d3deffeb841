"""All options, as a table over the records that hold settings (`config/`, `options/settings.py`).

A row names the field that an option sets, the option's flags, and its help. The type and the default come from the
record. The rows are in the order of --help. `docs/flags.md` is generated from this table.
"""

from __future__ import annotations

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
from ggpipe.options import lists, sampling, settings
from ggpipe.options.chat import ChatSettings, json_object
from ggpipe.options.doctor import DoctorSettings
from ggpipe.options.grammar import Constraint
from ggpipe.options.hub import HubSettings
from ggpipe.options.option import Option
from ggpipe.options.server import ServerConfig

MODEL, SERVER, PROMPT, COMPUTE, RANKS, SPECULATION, SAMPLING, ROPE, OUTPUT = PANELS = (
    "Model", "Server", "Prompt", "Compute", "Ranks", "Speculation", "Sampling", "RoPE and YaRN", "Output",
)  # fmt: skip
"""Panels of --help, from top to bottom."""


def _option(record: type, panel: str, field: str, *flags: str, **rest: Any) -> Option:
    """A row. `rest`: further fields of `Option`."""
    return Option(record=record, panel=panel, field=field, flags=flags, **rest)


def of_model(field: str, help: str) -> str:
    """Help of a setting for which the model's metadata may recommend a value."""
    default = getattr(SamplingConfig, field)
    text = ";".join(default) if isinstance(default, tuple) else f"{default:g}"
    return f"{help} Default: the model's own, or {text}."


# One option a line reads better than five.
# fmt: off
OPTIONS: tuple[Option, ...] = (
    _option(settings.ClusterSettings, MODEL, "path", metavar="CLUSTER", setting="cluster", help="Cluster file, name of a bundled cluster, or profile."),

    _option(settings.ModelSettings, MODEL, "target", "-m", "--model", setting="model", metavar="FILE", variable="LLAMA_ARG_MODEL", help="GGUF file of the target model. Of a model in several files, name the first."),
    _option(HubSettings, MODEL, "repo", "-hf", "-hfr", "--hf-repo", setting="hf_repo", metavar="USER/REPO[:QUANT]", instead_of="model", variable="LLAMA_ARG_HF_REPO", help="Download the model from this repository of the Hugging Face Hub, unless the cache has it (LLAMA_CACHE, HF_HUB_CACHE or ~/.cache/huggingface/hub, shared with llama.cpp). Default QUANT: Q4_K_M, or the first model."),
    _option(HubSettings, MODEL, "file", "-hff", "--hf-file", setting="hf_file", metavar="FILE", variable="LLAMA_ARG_HF_FILE", help="File in the repository of -hf, instead of the one with QUANT in its name."),
    _option(HubSettings, MODEL, "token", "-hft", "--hf-token", setting="hf_token", metavar="TOKEN", help="Access token for private models. Default: HF_TOKEN, or the one saved by `hf auth login`."),
    _option(HubSettings, MODEL, "offline", "--offline", variable="LLAMA_ARG_OFFLINE", help="Never use the network for models: -hf names a model in the cache."),
    _option(settings.LoadSettings, MODEL, "load_mode", "-lm", "--load-mode", metavar="MODE", variable="LLAMA_ARG_LOAD_MODE", help="How to load weights: auto, none, mmap, mlock, mmap+mlock, dio or stream. stream keeps in memory the weights that fit, and reads the others from the file when they are needed; auto is mmap, or stream if they do not fit."),
    _option(settings.LoadSettings, MODEL, "mmap", "--mmap/--no-mmap", help="Map weights from the file, instead of reading this rank's layers into memory."),
    _option(settings.LoadSettings, MODEL, "mlock", "--mlock", help="Lock weights in RAM."),
    _option(ModelConfig, MODEL, "stream_memory_gb", "--stream-memory", metavar="GB", help="Memory for the weights of each rank that streams them. Default: all that its machine has available."),
    _option(ModelConfig, MODEL, "repack", "--repack/--no-repack", " /-nr", variable="LLAMA_ARG_REPACK", help="Let ggml repack weights for this CPU."),
    _option(ModelConfig, MODEL, "numa", "--numa", metavar="TYPE", variable="LLAMA_ARG_NUMA", help="NUMA strategy: distribute (also if no value is given), isolate or numactl."),
    _option(ModelConfig, MODEL, "override_kv", "--override-kv", metavar="KEY=TYPE:VALUE", many=True, help="Override a metadata value of the model. Can be repeated."),
    _option(settings.LoraSettings, MODEL, "plain", "--lora", setting="loras", metavar="FILE", many=True, help="Apply a LoRA adapter. Can be repeated."),
    _option(settings.LoraSettings, MODEL, "scaled", "--lora-scaled", setting="lora_scaled", metavar="FILE:SCALE", many=True, parse=lists.scaled_loras, help="Apply a LoRA adapter, scaled by SCALE. Can be repeated."),
    _option(settings.ProfileSettings, MODEL, "layers", "--layers", metavar="A-B", parse=lists.layers, help="Layers to measure, A to B inclusive. Default: a quarter of them, or as many as the time allows."),
    _option(settings.DemoSettings, MODEL, "tiny", "--tiny", help="Use the bundled models as they are, and write nothing to the cache folder. Messages then take longer than computing."),

    _option(ServerConfig, SERVER, "host", "--host", metavar="HOST", variable="LLAMA_ARG_HOST", help="Addresses to listen on, separated by commas (0.0.0.0 = all IPv4 addresses of this machine)."),
    _option(ServerConfig, SERVER, "port", "--port", metavar="PORT", variable="LLAMA_ARG_PORT", help="Port to listen on (0 = any free port)."),
    _option(ServerConfig, SERVER, "n_slots", "-np", "--parallel", metavar="N", variable="LLAMA_ARG_N_PARALLEL", help="Maximum number of requests served at once; further ones wait in a queue. They share the context."),
    _option(ServerConfig, SERVER, "n_waiting", "--max-waiting", metavar="N", help="Maximum length of the queue. When it is full, further requests get 503 with Retry-After."),
    _option(ServerConfig, SERVER, "alias", "-a", "--alias", metavar="NAME", variable="LLAMA_ARG_ALIAS", help="Name of the model in the API, or several, separated by commas. Default: the name of its file."),
    _option(ServerConfig, SERVER, "tags", "--tags", metavar="LIST", variable="LLAMA_ARG_TAGS", help="Words about the model, separated by commas, which /v1/models returns."),
    _option(ServerConfig, SERVER, "api_key", "--api-key", metavar="KEY", variable="LLAMA_API_KEY", help="Require one of these API keys, separated by commas."),
    _option(ServerConfig, SERVER, "api_key_file", "--api-key-file", metavar="FILE", variable="LLAMA_ARG_API_KEY_FILE", help="Read more API keys from a file, one per line."),
    _option(ServerConfig, SERVER, "ssl_key_file", "--ssl-key-file", metavar="FILE", variable="LLAMA_ARG_SSL_KEY_FILE", help="PEM file with the private key for HTTPS."),
    _option(ServerConfig, SERVER, "ssl_cert_file", "--ssl-cert-file", metavar="FILE", variable="LLAMA_ARG_SSL_CERT_FILE", help="PEM file with the certificate for HTTPS."),
    _option(ServerConfig, SERVER, "cors_origins", "--cors-origins", metavar="LIST", parse=lists.words, variable="LLAMA_ARG_CORS_ORIGINS", help="Origins whose web pages may use this server (https://a.org,http://b.org:3000). localhost: all of this machine's; *: any. Default: * with API keys, otherwise localhost."),
    _option(ServerConfig, SERVER, "static_path", "--path", metavar="FOLDER", variable="LLAMA_ARG_STATIC_PATH", help="Serve the files in this folder instead of the chat page. They need no API key."),
    _option(ServerConfig, SERVER, "webui", "--webui/--no-webui", "--ui/--no-ui", variable="LLAMA_ARG_UI", help="Serve the chat page at /."),
    _option(ServerConfig, SERVER, "api_prefix", "--api-prefix", metavar="PREFIX", variable="LLAMA_ARG_API_PREFIX", help="Prefix of all paths, such as /llm."),
    _option(ServerConfig, SERVER, "timeout_s", "-to", "--timeout", metavar="S", variable="LLAMA_ARG_TIMEOUT", help="Seconds that a client may take to send a request, and that running requests may continue after SIGTERM."),
    _option(ServerConfig, SERVER, "sse_ping_interval_s", "--sse-ping-interval", metavar="S", variable="LLAMA_ARG_SSE_PING_INTERVAL", help="Send an SSE comment after this many idle seconds, so that proxies keep the connection open (-1 = never)."),
    _option(ServerConfig, SERVER, "max_body_mib", "--max-body", metavar="MIB", help="Maximum size of a request body."),
    _option(ServerConfig, SERVER, "log_file", "--log-file", metavar="FILE", variable="LLAMA_ARG_LOG_FILE", writes=True, help="Also write the log to this file, one line per request. If logrotate moves the file away, it is created again."),
    _option(ServerConfig, SERVER, "log_format", "--log-format", metavar="text|json", help="Log format: text, or one JSON object per line (--log-jsonl for short)."),
    _option(ServerConfig, SERVER, "log_disable", "--log-disable", help="Log nothing to stderr, except why the server stopped."),
    _option(ServerConfig, SERVER, "slots", "--slots/--no-slots", variable="LLAMA_ARG_ENDPOINT_SLOTS", help="Serve GET /slots: what each of the -np slots is doing."),
    _option(EngineConfig, SERVER, "slot_save_path", "--slot-save-path", metavar="FOLDER", help="Folder for the conversations that clients save and restore with POST /slots. Each rank writes its own file, on its own machine."),
    _option(ServerConfig, SERVER, "keep_slots", "--keep-slots", help="Save all slots in --slot-save-path when the server stops, and restore them when it starts."),
    _option(ServerConfig, SERVER, "metrics", "--metrics", variable="LLAMA_ARG_ENDPOINT_METRICS", help="Serve /metrics for Prometheus."),
    _option(ServerConfig, SERVER, "reasoning_format", "--reasoning-format", metavar="auto|deepseek|none", variable="LLAMA_ARG_THINK", help="Return the model's reasoning as reasoning_content (auto, deepseek, deepseek-legacy), or as part of the content (none)."),

    _option(settings.BatchSettings, PROMPT, "input", metavar="IN", setting="input", help="File of prompts: one per line, a JSON list as in SpecInfer, or JSON lines in OpenAI's batch format."),
    _option(settings.BatchSettings, PROMPT, "format", "--format", metavar="KIND", help="Format of IN: lines, specinfer or openai. Default: detected."),
    _option(settings.PromptSettings, PROMPT, "text", "-p", "--prompt", setting="prompt", metavar="TEXT", help="Prompt to continue."),
    _option(settings.PromptSettings, PROMPT, "file", "-f", "--file", metavar="FILE", help="Read the prompt from a file."),
    _option(settings.PromptSettings, PROMPT, "escape", "--escape/--no-escape", "-e/ ", help=r"Process escape sequences (\n, \t, \xHH, …) in the prompt."),
    _option(settings.PromptSettings, PROMPT, "n_predict", "-n", "--predict", "--n-predict", metavar="N", variable="LLAMA_ARG_N_PREDICT", help="Max tokens to generate (-1 = until the model stops or the context is full)."),
    _option(ChatSettings, PROMPT, "single_turn", "-st", "--single-turn", help="Treat the prompt as a user message: apply the model's chat template, and generate the answer."),
    _option(ChatSettings, PROMPT, "system", "-sys", "--system-prompt", metavar="TEXT", help="System prompt: instructions to the model, before the user's message."),
    _option(ChatSettings, PROMPT, "template", "--chat-template", setting="chat_template", metavar="JINJA", variable="LLAMA_ARG_CHAT_TEMPLATE", help="Chat template to use instead of the model's own: in Jinja, or the name of one that is built into llama.cpp, such as llama3. Models without a template get chatml."),
    _option(ChatSettings, PROMPT, "template_file", "--chat-template-file", setting="chat_template_file", metavar="FILE", variable="LLAMA_ARG_CHAT_TEMPLATE_FILE", help="Read the chat template from a file."),
    _option(ChatSettings, PROMPT, "template_kwargs", "--chat-template-kwargs", setting="chat_template_kwargs", metavar="JSON", parse=json_object, optional=True, variable="LLAMA_ARG_CHAT_TEMPLATE_KWARGS", help='Additional variables for the chat template: {"enable_thinking": false}.'),
    _option(ChatSettings, PROMPT, "reasoning", "-rea", "--reasoning", metavar="on|off|auto", variable="LLAMA_ARG_REASONING", help="Whether the model reasons before it answers, if its template has a switch for it (auto = on)."),
    _option(settings.PromptCacheFile, PROMPT, "path", "--prompt-cache", setting="prompt_cache", metavar="FILE", writes=True, help="Save the prompt's KV cache to a file, and reuse the part of it that the next prompt shares. Each rank writes its own layers to its own file: FILE, FILE.rank1, ..."),
    _option(settings.PromptCacheFile, PROMPT, "all", "--prompt-cache-all", setting="prompt_cache_all", help="Save the output's KV cache as well. The file is then written at the end."),
    _option(settings.PromptCacheFile, PROMPT, "read_only", "--prompt-cache-ro", setting="prompt_cache_ro", help="Read the prompt cache, but do not write it."),
    _option(EngineConfig, PROMPT, "cache_prompt", "--cache-prompt/--no-cache-prompt", variable="LLAMA_ARG_CACHE_PROMPT", help="Keep the KV cache of finished requests, for prompts that start the same way."),
    _option(settings.EmbeddingSettings, PROMPT, "pooling", "--pooling", metavar="none|mean|cls|last", variable="LLAMA_ARG_POOLING", help="How to pool token embeddings: none (one vector per token), mean, cls (first token) or last. Default: the model's own."),
    _option(settings.EmbeddingSettings, PROMPT, "embd_normalize", "--embd-normalize", metavar="N", help="How to normalize embeddings: 2 = Euclidean length 1, 1 = absolute values add up to 1, -1 = not at all, 0 = largest absolute value 32760, above 2 = p-norm."),
    _option(settings.SimulatedText, PROMPT, "n_predict", "-n", "--predict", "--n-predict", metavar="N", help="Tokens to generate (-1 = 256, or as many as were recorded)."),
    _option(settings.SimulatedText, PROMPT, "prompt_tokens", "--prompt-tokens", metavar="N", help="Length of the prompt in tokens."),
    _option(settings.SimulatedText, PROMPT, "acceptance", "--acceptance", metavar="P", help="Probability that the draft's best candidate is the target's token. Default: 0.7."),
    _option(settings.SimulatedText, PROMPT, "second_choice", "--second-choice", metavar="P", help="Probability that the draft's second choice is the target's token where its best candidate is not. Default: 0.24."),
    _option(settings.SimulatedText, PROMPT, "confidence", "--confidence", metavar="KIND", help="Whether the draft's probabilities are calibrated, overconfident or underconfident. never-right: it is confident, but always wrong."),
    _option(settings.SimulatedDrafters, PROMPT, "drafters", "--drafters", metavar="LIST", optional=True, parse=lists.simulated_drafters, help="Drafters, separated by commas, each with its own --acceptance: draft:0.6,draft:0.6,eagle3:0.7. For ngram, the share of the output that repeats earlier text: draft:0.6,ngram:0.3. Default: the draft model, and ngram."),
    _option(settings.SimulatedDrafters, PROMPT, "overlap", "--overlap", metavar="P", help="Share of positions at which further draft models are right or wrong together with the first one (0 = independently, 1 = always)."),
    _option(settings.SimulatedText, PROMPT, "recording", "--recording", metavar="FILE", help="Use the prompts, outputs and candidates of a `ggpipe record` file, instead of random ones."),
    _option(settings.SimulatedTraffic, PROMPT, "users", "--users", metavar="N", help="Simulate N users, each of whom sends a request as soon as the one before is answered."),
    _option(settings.SimulatedTraffic, PROMPT, "rate", "--rate", metavar="R", help="Simulate requests that arrive at random, R per second on average."),
    _option(settings.SimulatedTraffic, PROMPT, "requests", "--requests", metavar="N", help="Number of requests. Default: 2 per user, or 32 with --rate. Without --users or --rate, they arrive together."),
    _option(settings.SimulatedTraffic, PROMPT, "arrivals", "--arrivals", metavar="FILE", help="Read requests from a CSV or JSON file, one per line: arrival time in seconds, prompt tokens, tokens to generate."),
    _option(settings.SimulatedTraffic, PROMPT, "concurrent", "--concurrent", metavar="N", help="Maximum number of requests served at once; further ones wait. Default: one per user, or 4."),
    _option(settings.SimulatedText, PROMPT, "seed", "-s", "--seed", metavar="N", help="Random seed."),
    _option(settings.BenchSettings, PROMPT, "files", "-f", "--file", metavar="FILE", many=True, help="Read a prompt from a file. Can be repeated. Default: the bundled prompts."),
    _option(settings.BenchSettings, PROMPT, "rounds", "--rounds", metavar="N", help="Number of rounds. In each, every mode runs once per prompt."),
    _option(settings.BenchSettings, PROMPT, "full_length", "--ignore-eos/--no-ignore-eos", help="Ignore the end of text, so that all outputs have -n tokens."),
    _option(settings.RecordSettings, PROMPT, "files", "-f", "--file", metavar="FILE", many=True, help="Read a prompt from a file. Can be repeated."),

    _option(ContextConfig, COMPUTE, "n_ctx", "-c", "--ctx-size", metavar="N", variable="LLAMA_ARG_CTX_SIZE", help="Context size in tokens (0 = the model's own)."),
    _option(EngineConfig, COMPUTE, "warmup", "--warmup/--no-warmup", help="Allocate all KV cells while loading, instead of on first use."),
    _option(EngineConfig, COMPUTE, "n_requests", "--concurrent", metavar="N", help="Maximum number of requests served at once; further ones wait. They share the context."),
    _option(ContextConfig, COMPUTE, "n_batch", "-b", "--batch-size", metavar="N", variable="LLAMA_ARG_BATCH", help="Maximum number of prompt tokens in a batch."),
    _option(ContextConfig, COMPUTE, "n_ubatch", "-ub", "--ubatch-size", metavar="N", variable="LLAMA_ARG_UBATCH", help="Maximum number of prompt tokens in a run. With several stages, runs are shorter, to keep all of them busy."),
    _option(PipelineConfig, COMPUTE, "threads", "-t", "--threads", metavar="LIST", parse=lists.numbers, variable="LLAMA_ARG_THREADS", help="Number of threads: one value, or one per rank (6,32,20). -1 = one per core of the machine."),
    _option(PipelineConfig, COMPUTE, "threads_batch", "-tb", "--threads-batch", metavar="LIST", parse=lists.numbers, help="Number of threads for prompts: one value, or one per rank (-1 = same as -t)."),
    _option(ContextConfig, COMPUTE, "flash_attn", "-fa", "--flash-attn", metavar="on|off|auto", variable="LLAMA_ARG_FLASH_ATTN", help="Flash attention: on, off or auto."),
    _option(ContextConfig, COMPUTE, "fast_kernels", "--fast-kernels/--no-fast-kernels", help="Use ggpipe's own kernels where they are faster than ggml's: flash attention, recurrent layers and products with weights, on CPUs with AVX2. Results are equal except for rounding. Default: on, but off with --exact."),
    _option(ContextConfig, COMPUTE, "cache_type_k", "-ctk", "--cache-type-k", metavar="TYPE", variable="LLAMA_ARG_CACHE_TYPE_K", help="KV cache type of K: f32, f16, bf16, q8_0, q4_0, q4_1, iq4_nl, q5_0 or q5_1."),
    _option(ContextConfig, COMPUTE, "cache_type_v", "-ctv", "--cache-type-v", metavar="TYPE", variable="LLAMA_ARG_CACHE_TYPE_V", help="KV cache type of V; same choices as -ctk."),
    _option(PipelineConfig, COMPUTE, "check_memory", "--check-memory", help="Refuse to load if a machine has less available memory than its ranks need, instead of warning. A given -c whose cells do not fit is always refused. When --restart moves layers to other machines, weights are then not streamed either."),
    _option(ContextConfig, COMPUTE, "exact", "--exact", help="Compute the same bits for every split, mode and number of threads: with ggml's reference kernels, which are slower, or with ggpipe's own if --fast-kernels is given."),

    _option(settings.RankSettings, RANKS, "layer_split", "--mpi-layer-split", metavar="LIST", optional=True, parse=lists.layer_split, help="Share of the layers for each rank, head first (0.1,0.4,0.5). SHARE*N: N ranks compute these layers together, as a group (0.5*2,0.5*2). Ranks of the draft model come after a slash (0.5,0.5/1.0), those of each further draft model after another one. Without mpirun, ggpipe starts that many ranks. auto: plan the split after a quick measurement. Default: even."),
    _option(settings.BenchSettings, RANKS, "layouts", "--mpi-layer-split", metavar="LIST", many=True, help="Share of the layers for each rank, as in `ggpipe generate`. Repeat it to compare layouts: each is loaded on its own ranks, and they take turns."),
    _option(PipelineConfig, RANKS, "tensor_split", "-ts", "--tensor-split", metavar="LIST", parse=lists.weights, help="Proportions in which the ranks of a group divide each tensor (3,1). Applies to groups with that many ranks; others divide evenly."),
    _option(PipelineConfig, RANKS, "tensor_wire", "--tensor-wire", metavar="f32|f16", help="Number format in which the machines of a group exchange their sums. f16 halves the bytes, and rounds."),
    _option(PipelineConfig, RANKS, "send_weights", "--send-weights", help="Machines without a model's file get the weights of their layers from the first machine, and keep them in their cache folder."),
    _option(PipelineConfig, RANKS, "rank_timeout_s", "--rank-timeout", metavar="S", help="Stop the job if a rank sends nothing for this many seconds (0 = never)."),
    _option(PipelineConfig, RANKS, "launch_timeout_s", "--launch-timeout", metavar="S", help="Name machines that have not answered after this many seconds when ranks are started. On machines that have, ranks may take 60 times as long to start."),
    _option(settings.RankSettings, RANKS, "restart", "--restart", metavar="N", help="Restart ranks that died, at most N times in ten minutes, and continue where generation stopped. Layers of unreachable machines move to the others."),
    _option(settings.RankSettings, RANKS, "hostfile", "--hostfile", metavar="FILE", help="File with the machines to start ranks on, in mpirun's format. Default: the machines of the Slurm job, or this one."),
    _option(settings.ProfileSettings, RANKS, "n_ranks", "-r", "--ranks", metavar="N", help="Number of ranks to start. Default: the slots in --hostfile, or one."),
    _option(settings.PlanSettings, RANKS, "users", "--users", metavar="N", help="Plan for N simultaneous users: maximize the sum of their tokens per second."),
    _option(settings.PlanSettings, RANKS, "n_ranks", "-r", "--ranks", metavar="N", help="Number of ranks to use, including those that draft. Default: whatever is fastest."),

    _option(settings.ModelSettings, SPECULATION, "drafts", "-md", "--model-draft", "--spec-draft-model", setting="draft.model", metavar="FILE", many=True, variable="LLAMA_ARG_SPEC_DRAFT_MODEL", help="GGUF file of a draft model: a smaller model of the same family, or an EAGLE-3 or DFlash head for the model. It runs on the ranks after the / of --mpi-layer-split, or else inside the first rank. Can be repeated: all of them draft, each on the ranks after its own /."),
    _option(HubSettings, SPECULATION, "draft_repos", "-hfd", "-hfrd", "--hf-repo-draft", "--spec-draft-hf", setting="draft.hf_repo", metavar="USER/REPO[:QUANT]", many=True, variable="LLAMA_ARG_SPEC_DRAFT_HF_REPO", help="Download a draft model from the Hugging Face Hub, as -hf does. Can be repeated."),
    _option(SpeculationConfig, SPECULATION, "mode", "--mode", metavar="MODE", optional=True, help="async: draft while earlier draft tokens are verified (default with -md). speculative: draft, verify, repeat. iterative: no draft tokens."),
    _option(SpeculationConfig, SPECULATION, "drafters", "--spec-type", setting="spec_type", metavar="LIST", optional=True, parse=registry.read_names, variable="LLAMA_ARG_SPEC_TYPE", help=f"Drafters, separated by commas: {', '.join((*registry.WITH_MODEL, *registry.WITHOUT_MODEL))}, or none. Several drafters share one tree. draft: the draft model. eagle3, dflash: the EAGLE-3 or DFlash (also DSpark) head that -md names. mtp: the model's own layers for multi-token prediction, on the last rank after the / or else inside the first rank. ngram: repeat what followed the same tokens earlier, in this request or another one; needs no model. grammar: the tokens that a JSON schema or a tool forces; needs no model. Default: grammar, and with -md what its file is and ngram."),
    _option(settings.PlanSettings, SPECULATION, "mode", "--mode", metavar="MODE", help="Plan for this mode only: async, speculative or iterative. Default: the fastest."),
    _option(SpeculationConfig, SPECULATION, "policy", "--policy", metavar="POLICY", help="How draft trees grow in async mode. best-first: most probable paths first, wider if additional rows are cheap. thresholds: PipeInfer's policy, selected by any of -ps, -pr, -pd and -np."),
    _option(SpeculationConfig, SPECULATION, "n_draft", "--draft", "--draft-max", "--draft-n", "--spec-draft-n-max", metavar="N", variable="LLAMA_ARG_SPEC_DRAFT_N_MAX", optional=True, help="Maximum number of draft tokens in a micro-batch, and in a run. Default: 64 with --policy best-first, otherwise 8."),
    _option(SpeculationConfig, SPECULATION, "n_min", "--draft-min", "--spec-draft-n-min", metavar="N", variable="LLAMA_ARG_SPEC_DRAFT_N_MIN", help="Minimum number of draft tokens in a micro-batch; smaller ones are not sent."),
    _option(SpeculationConfig, SPECULATION, "p_accept", "-pa", "--p-accept", "--draft-p-min", "--spec-draft-p-min", metavar="P", variable="LLAMA_ARG_SPEC_DRAFT_P_MIN", help="End a branch if the draft's best candidate is less probable than this."),
    _option(SpeculationConfig, SPECULATION, "p_split", "-ps", "--p-split", "--draft-p-split", "--spec-draft-p-split", metavar="P", variable="LLAMA_ARG_SPEC_DRAFT_P_SPLIT", help="Split a branch if another candidate is at least this probable."),
    _option(SpeculationConfig, SPECULATION, "p_recovery", "-pr", "--p-recovery", metavar="P", help="Raise -pa and -ps by this much for each micro-batch since the last accepted token."),
    _option(SpeculationConfig, SPECULATION, "p_decay", "-pd", "--p-decay", metavar="P", help="Lower -pa and -ps by this much for each attempt since the last accepted token that drafted nothing."),
    _option(SpeculationConfig, SPECULATION, "n_parallel", "-np", "--parallel", metavar="N", help="Number of branches drafted in parallel, with --policy thresholds."),
    _option(ServerConfig, SPECULATION, "n_branches", "--branches", metavar="N", help="Number of branches drafted in parallel (-np in other commands). More than 1 selects --policy thresholds."),
    _option(SpeculationConfig, SPECULATION, "n_draft_rows", "--draft-rows", metavar="N", help="Maximum number of rows in a run of the draft model. Default: 16 with --policy best-first, otherwise same as -np."),
    _option(SpeculationConfig, SPECULATION, "n_seq", "--sequences", metavar="N", help="Number of sequence ids for branches in flight, including the output's. Default: 129 with --policy best-first, shared by all requests; otherwise same as -np. With more than -np, new branches can start while older ones are verified."),
    _option(DraftConfig, SPECULATION, "threads", "-td", "--threads-draft", setting="draft.threads", metavar="N", help="Number of threads for the draft model (-1 = same as -t)."),
    _option(DraftConfig, SPECULATION, "threads_batch", "-tbd", "--threads-batch-draft", setting="draft.threads_batch", metavar="N", help="Number of threads for the draft model's prompts (-1 = same as -td)."),
    _option(DraftConfig, SPECULATION, "window", "--draft-window", setting="draft.window", metavar="N", help="Number of tokens of a request that draft models see: the latest ones (0 = all). With fewer, they take less memory and, in long contexts, less time. Draft heads and MTP layers see all."),
    _option(SpeculationConfig, SPECULATION, "cancel", "--cancel/--no-cancel", help="Cancel runs in flight when all their draft tokens are rejected."),
    _option(SpeculationConfig, SPECULATION, "continuous", "--continuous/--no-continuous", help="Keep drafting while earlier draft tokens are verified."),
    _option(settings.BenchSettings, SPECULATION, "modes", "--modes", metavar="LIST", parse=lists.words, help="Modes to measure: iterative, speculative, async, single (the whole model in one process). Default: all that are possible."),

    _option(SamplingConfig, SAMPLING, "samplers", "--samplers", metavar="LIST", parse=sampling.samplers, optional=True, help=of_model("samplers", "Samplers in the order of use, separated by semicolons or commas. Those not named are not used. adaptive_p and infill exist as well.")),
    _option(SamplingConfig, SAMPLING, "samplers", "--sampling-seq", "--sampler-seq", setting="sampling_seq", metavar="LETTERS", optional=True, parse=samplers_by_letter, help="Samplers by their letters, instead of --samplers. The default is edskypmxt."),
    _option(SamplingConfig, SAMPLING, "temp", "--temp", "--temperature", metavar="T", optional=True, variable="LLAMA_ARG_TEMPERATURE", help=of_model("temp", "Temperature (0 or less = greedy).")),
    _option(SamplingConfig, SAMPLING, "top_k", "--top-k", metavar="N", optional=True, variable="LLAMA_ARG_TOP_K", help=of_model("top_k", "Sample only from the N most likely tokens (0 = no limit).")),
    _option(SamplingConfig, SAMPLING, "top_p", "--top-p", metavar="P", optional=True, variable="LLAMA_ARG_TOP_P", help=of_model("top_p", "Sample only from the most likely tokens whose probabilities add up to P.")),
    _option(SamplingConfig, SAMPLING, "min_p", "--min-p", metavar="P", optional=True, variable="LLAMA_ARG_MIN_P", help=of_model("min_p", "Sample only from tokens with at least P times the probability of the most likely one.")),
    _option(SamplingConfig, SAMPLING, "top_n_sigma", "--top-n-sigma", "--top-nsigma", metavar="X", help="Sample only from tokens whose logit is within X standard deviations of the highest one (0 or less = no limit)."),
    _option(SamplingConfig, SAMPLING, "typical_p", "--typical", "--typical-p", metavar="P", help="Sample only from the most typical tokens whose probabilities add up to P (1 = no limit)."),
    _option(SamplingConfig, SAMPLING, "xtc_probability", "--xtc-probability", metavar="P", optional=True, help=of_model("xtc_probability", "Probability with which XTC removes the most likely tokens (0 = never).")),
    _option(SamplingConfig, SAMPLING, "xtc_threshold", "--xtc-threshold", metavar="P", optional=True, help=of_model("xtc_threshold", "XTC removes tokens that are at least this likely, except for the least likely of them (above 0.5 = none).")),
    _option(SamplingConfig, SAMPLING, "dynatemp_range", "--dynatemp-range", metavar="X", help="Vary the temperature by up to X around --temp, depending on the entropy of the candidates (0 = off)."),
    _option(SamplingConfig, SAMPLING, "dynatemp_exponent", "--dynatemp-exp", metavar="X", help="Exponent of the dynamic temperature."),
    _option(SamplingConfig, SAMPLING, "repeat_last_n", "--repeat-last-n", metavar="N", optional=True, help=of_model("repeat_last_n", "Number of recent tokens to penalize (0 = off, -1 = the whole context).")),
    _option(SamplingConfig, SAMPLING, "repeat_penalty", "--repeat-penalty", metavar="X", optional=True, variable="LLAMA_ARG_REPEAT_PENALTY", help=of_model("repeat_penalty", "Penalty for repeated tokens (1 = off).")),
    _option(SamplingConfig, SAMPLING, "presence_penalty", "--presence-penalty", metavar="X", variable="LLAMA_ARG_PRESENCE_PENALTY", help="Penalty for tokens that have already occurred (0 = off)."),
    _option(SamplingConfig, SAMPLING, "frequency_penalty", "--frequency-penalty", metavar="X", variable="LLAMA_ARG_FREQUENCY_PENALTY", help="Penalty for tokens that have already occurred, times how often (0 = off)."),
    _option(SamplingConfig, SAMPLING, "dry_multiplier", "--dry-multiplier", metavar="X", help="DRY: penalty for tokens that would continue a repetition (0 = off)."),
    _option(SamplingConfig, SAMPLING, "dry_base", "--dry-base", metavar="X", help="DRY: factor by which the penalty grows with each repeated token."),
    _option(SamplingConfig, SAMPLING, "dry_allowed_length", "--dry-allowed-length", metavar="N", help="DRY: number of tokens that may be repeated without penalty."),
    _option(SamplingConfig, SAMPLING, "dry_penalty_last_n", "--dry-penalty-last-n", metavar="N", help="DRY: number of recent tokens in which to look for repetitions (0 = off, -1 = the whole context)."),
    _option(SamplingConfig, SAMPLING, "dry_sequence_breakers", "--dry-sequence-breaker", metavar="TEXT", many=True, parse=sampling.breakers, help=r"DRY: string that interrupts a repetition. Can be repeated; none: no such string. Default: \n, a colon, a double quote and an asterisk."),
    _option(SamplingConfig, SAMPLING, "mirostat", "--mirostat", metavar="N", optional=True, help=of_model("mirostat", "Use Mirostat 1 or 2 after --temp, instead of all other samplers (0 = off).")),
    _option(SamplingConfig, SAMPLING, "mirostat_eta", "--mirostat-lr", metavar="X", optional=True, help=of_model("mirostat_eta", "Learning rate of Mirostat.")),
    _option(SamplingConfig, SAMPLING, "mirostat_tau", "--mirostat-ent", metavar="X", optional=True, help=of_model("mirostat_tau", "Target entropy of Mirostat.")),
    _option(SamplingConfig, SAMPLING, "adaptive_target", "--adaptive-target", metavar="P", help="Probability of the tokens that adaptive_p prefers, if --samplers names it (below 0 = off)."),
    _option(SamplingConfig, SAMPLING, "adaptive_decay", "--adaptive-decay", metavar="X", help="How slowly adaptive_p adapts to what it has drawn, from 0 to 0.99."),
    _option(SamplingConfig, SAMPLING, "stop", "-r", "--reverse-prompt", setting="stop", metavar="TEXT", many=True, help="Stop generating when the model produces TEXT; TEXT itself is not printed. Can be repeated."),
    _option(SamplingConfig, SAMPLING, "logit_bias", "-l", "--logit-bias", metavar="TOKEN(+/-)BIAS", many=True, parse=sampling.logit_bias, help="Add a bias to the logit of a token, by token id: 15043+1, or 15043-inf to exclude it. Can be repeated."),
    _option(Constraint, SAMPLING, "grammar", "--grammar", metavar="GBNF", help="Constrain the output with a grammar, in GBNF."),
    _option(Constraint, SAMPLING, "grammar_file", "--grammar-file", metavar="FILE", help="Read the grammar from a file."),
    _option(Constraint, SAMPLING, "json_schema", "-j", "--json-schema", metavar="SCHEMA", help="Constrain the output with a JSON schema ({} = any JSON object)."),
    _option(Constraint, SAMPLING, "json_schema_file", "-jf", "--json-schema-file", metavar="FILE", help="Read the JSON schema from a file."),
    _option(SamplingConfig, SAMPLING, "reasoning_budget", "--reasoning-budget", metavar="N", variable="LLAMA_ARG_THINK_BUDGET", help="Maximum number of tokens of reasoning before an answer. ggpipe then ends the reasoning itself (0 = at once, -1 = no limit)."),
    _option(SamplingConfig, SAMPLING, "reasoning_budget_message", "--reasoning-budget-message", metavar="TEXT", variable="LLAMA_ARG_THINK_BUDGET_MESSAGE", help="Text to add to the reasoning before ggpipe ends it."),
    _option(SamplingConfig, SAMPLING, "seed", "-s", "--seed", metavar="N", help="Random seed (-1 = a new one each time)."),
    _option(SamplingConfig, SAMPLING, "ignore_eos", "--ignore-eos", help="Ignore the end of text: always generate -n tokens."),

    _option(ContextConfig, ROPE, "rope_scaling", "--rope-scaling", metavar="KIND", variable="LLAMA_ARG_ROPE_SCALING_TYPE", help="RoPE scaling: none, linear or yarn. Default: the model's own."),
    _option(ContextConfig, ROPE, "rope_scale", "--rope-scale", metavar="X", variable="LLAMA_ARG_ROPE_SCALE", help="Factor by which to stretch the context (0 = the model's own)."),
    _option(ContextConfig, ROPE, "rope_freq_base", "--rope-freq-base", metavar="X", variable="LLAMA_ARG_ROPE_FREQ_BASE", help="RoPE base frequency (0 = the model's own)."),
    _option(ContextConfig, ROPE, "rope_freq_scale", "--rope-freq-scale", metavar="X", variable="LLAMA_ARG_ROPE_FREQ_SCALE", help="RoPE frequency scale: 1 / --rope-scale (0 = the model's own)."),
    _option(ContextConfig, ROPE, "yarn_orig_ctx", "--yarn-orig-ctx", metavar="N", variable="LLAMA_ARG_YARN_ORIG_CTX", help="Context size that the model was trained with, in tokens (0 = the model's own)."),
    _option(ContextConfig, ROPE, "yarn_ext_factor", "--yarn-ext-factor", metavar="X", variable="LLAMA_ARG_YARN_EXT_FACTOR", help="YaRN extrapolation mix (-1 = the model's own)."),
    _option(ContextConfig, ROPE, "yarn_attn_factor", "--yarn-attn-factor", metavar="X", variable="LLAMA_ARG_YARN_ATTN_FACTOR", help="YaRN magnitude scale (-1 = the model's own)."),
    _option(ContextConfig, ROPE, "yarn_beta_slow", "--yarn-beta-slow", metavar="X", variable="LLAMA_ARG_YARN_BETA_SLOW", help="YaRN high correction dimension (-1 = the model's own)."),
    _option(ContextConfig, ROPE, "yarn_beta_fast", "--yarn-beta-fast", metavar="X", variable="LLAMA_ARG_YARN_BETA_FAST", help="YaRN low correction dimension (-1 = the model's own)."),

    _option(settings.DisplaySettings, OUTPUT, "color", "--color", metavar="on|off|auto", help="Live display and colour: on, even if stderr is not a terminal; off, without colour; or auto."),
    _option(settings.ChatOutput, OUTPUT, "markdown", "--markdown/--no-markdown", help="Format answers as Markdown, paragraph by paragraph, or print them as they come."),
    _option(settings.GenerateOutput, OUTPUT, "display_prompt", "--display-prompt/--no-display-prompt", help="Show the prompt in the live display."),
    _option(settings.GenerateOutput, OUTPUT, "csv", "--csv", metavar="FILE", writes=True, help="Append a line: prefill t/s, decode t/s, ITL in s, TTFT in s."),
    _option(settings.GenerateOutput, OUTPUT, "json", "--json", metavar="FILE", writes=True, help="Write all measurements as JSON."),
    _option(settings.GenerateOutput, OUTPUT, "trace", "--trace", metavar="FILE", writes=True, help="Write a timeline of all ranks, for Perfetto or chrome://tracing."),
    _option(DoctorSettings, OUTPUT, "json", "--json", setting="doctor_json", help="Print all facts and findings as JSON."),
    _option(DoctorSettings, OUTPUT, "report", "--report", setting="doctor_report", help="Print all facts and findings as text, for a bug report."),
    _option(settings.LogSettings, OUTPUT, "verbose", "-v", "--verbose", help="Show libllama's log messages."),
    _option(settings.RecordSettings, OUTPUT, "output", "-o", "--output", metavar="FILE", writes=True, help="Write the recording, as JSON."),
    _option(settings.RecordSettings, OUTPUT, "candidates", "--candidates", metavar="N", help="Number of the draft's candidates to keep per token."),
    _option(settings.SimulateSettings, OUTPUT, "against", "--against", metavar="RECEIPT", instead_of="cluster", help="Simulate what `ggpipe bench --receipt` measured, and compare the speeds."),
    _option(settings.SimulateSettings, OUTPUT, "sweep", "--sweep", metavar="NAME=VALUES", many=True, help="Simulate each of these values: draft=2..8, pa=0.05..0.6, np=1,2,4, latency-us=20..200/20. Repeat it to simulate all combinations. Names: draft, draft-min, pa, ps, pr, pd, np, acceptance, prompt-tokens, latency-us, gbit, users, rate, concurrent."),
    _option(settings.SimulateSettings, OUTPUT, "csv", "--csv", metavar="FILE", writes=True, help="Write the results as CSV, a line per mode and combination of values."),
    _option(settings.SimulateSettings, OUTPUT, "json", "--json", metavar="FILE", writes=True, help="Write all settings and results as JSON."),
    _option(settings.SimulatedTraffic, OUTPUT, "requests_csv", "--requests-csv", metavar="FILE", writes=True, help="Write a line per request and mode as CSV, for several requests."),
    _option(settings.SimulateSettings, OUTPUT, "plot", "--plot", metavar="FILE", writes=True, help="Plot the speeds of a sweep, or the timeline of one simulation, as .png, .svg or .pdf."),
    _option(settings.SimulateSettings, OUTPUT, "trace", "--trace", metavar="FILE", writes=True, help="Write a timeline of all ranks, for Perfetto or chrome://tracing."),
    _option(settings.ProfileSettings, OUTPUT, "seconds", "--seconds", metavar="S", help="Seconds to measure, not counting the time to load."),
    _option(settings.ProfileSettings, OUTPUT, "output", "-o", "--output", metavar="FILE", writes=True, help="Write the profile as JSON (- = to stdout)."),
    _option(settings.PlanSettings, OUTPUT, "seconds", "--seconds", metavar="S", help="Seconds to measure if no cluster is given."),
    _option(settings.PlanSettings, OUTPUT, "json", "--json", metavar="FILE", writes=True, help="Write the plan as JSON."),
    _option(settings.BatchSettings, OUTPUT, "output", "-o", "--output", metavar="OUT", writes=True, help="Write each answer to OUT as soon as it is complete. Prompts that OUT already answers are skipped."),
    _option(settings.BatchSettings, OUTPUT, "output_format", "--output-format", metavar="KIND", help="Format of OUT: openai, or specinfer, which is written once all prompts are answered."),
    _option(settings.BenchSettings, OUTPUT, "csv", "--csv", metavar="FILE", writes=True, help="Write a line per run: prefill t/s, decode t/s, ITL in s, TTFT in s, mode, round, prompt."),
    _option(settings.BenchSettings, OUTPUT, "json", "--json", metavar="FILE", writes=True, help="Write all measurements as JSON."),
    _option(settings.BenchSettings, OUTPUT, "receipt", "--receipt", metavar="FILE", writes=True, help="Write a receipt, as JSON: machines, links, versions, models and outputs (as hashes), settings, and all runs. Measures the machines first. `ggpipe simulate --against FILE` compares the simulator with it."),
    _option(settings.BenchSettings, OUTPUT, "profile_seconds", "--seconds", setting="seconds", metavar="S", help="Seconds to measure the machines for --receipt."),
    _option(settings.BenchSettings, OUTPUT, "plots", "--plots", metavar="FOLDER", help="Plot speed, TTFT, ITL, a timeline, and acceptance by position, into this folder."),
    _option(settings.BenchSettings, OUTPUT, "plot_format", "--plot-format", metavar="svg|png|pdf", help="File format of --plots."),
    _option(settings.BenchSettings, OUTPUT, "trace", "--trace", metavar="FOLDER", help="Write the timeline of each mode's median run, for Perfetto or chrome://tracing."),
)
# fmt: on

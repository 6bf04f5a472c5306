"""The groups of options that help shows, for the commands with many, and the options that a bare `--help` shows.

An option's group stands where the option is declared. The second tuple of a group has options that come before the
others, which follow as they are declared. Names are those of parameters.
"""

from __future__ import annotations

from alignedserve.cli.command import OptionGroup

_MODEL_FIRST = (
    *("dtype", "device", "tensor_parallel_size", "load_format", "revision", "tokenizer"),
    *("skip_tokenizer_init", "allow_special_tokens_in_messages", "enable_lora", "max_loras", "max_lora_rank"),
)
_MODEL = OptionGroup("model", "Model", ("max_model_len", "quantization", "lora_modules"), _MODEL_FIRST)
_MEMORY = OptionGroup("memory", "Memory", ("kv_cache_memory_bytes", "gpu_memory_utilization"))
_POOL_FIRST = ("kv_cache_dtype", "block_size", "enable_prefix_caching", "hidden_cache", "share_blocks")
_ENGINE = (
    _MODEL,
    _MEMORY,
    OptionGroup("limits", "Limits", ("max_num_seqs", "max_num_batched_tokens")),
    OptionGroup("operation", "Operation"),
    OptionGroup("expert", "Expert"),
)

SERVE = (
    OptionGroup(
        "model",
        "Model",
        ("served_model_name", *_MODEL.main),
        (*_MODEL_FIRST, "seed", "lora_modules_from"),
    ),
    OptionGroup(
        "latency",
        "Latency and objectives",
        ("slo_ttft_ms", "slo_tbt_ms", "policy"),
        ("slo_priority_ttft_ms", "slo_priority_tbt_ms", "cost_profile", "chunk_share"),
    ),
    OptionGroup(
        "batch",
        "Batch jobs",
        ("be_share", "state_dir", "redis_url"),
        ("files_at", "batch_max_num_lines", "batch_inputs_from"),
    ),
    OptionGroup(
        "memory",
        "Memory",
        (*_MEMORY.main, "pool_memory_bytes"),
        ("pool_kv_dtype", "pool_promised_share", "verify_blocks", *_POOL_FIRST),
    ),
    OptionGroup(
        "instances",
        "Instances and hosts",
        ("prefill_instances", "decode_instances", "colocated_instances", "address"),
        ("min_islands", "max_islands", "gateways", "island_gateways", "change_roles"),
    ),
    OptionGroup(
        "limits",
        "Limits",
        ("max_num_seqs", "max_num_queued_reqs"),
        (
            *("max_requests_per_key", "max_num_batched_tokens", "max_prefill_chunk", "max_num_queued_tokens"),
            *(
                "max_connections",
                "max_body_bytes",
                "max_total_body_bytes",
                "max_prompt_tokens",
                "max_call_tokens",
            ),
            *("max_choices", "max_logprobs", "max_stop_strings", "max_stop_chars", "max_token_ids"),
            *("max_grammar_bytes", "grammar_timeout_s", "max_open_batches", "max_open_batches_per_key"),
        ),
    ),
    OptionGroup(
        "network",
        "Network and access",
        ("host", "port", "api_key", "api_key_file"),
        ("operator_key", "operator_key_file", "allow_no_auth", "allowed_origins", "allowed_hosts"),
    ),
    OptionGroup("operation", "Operation", ("log_level", "log_dir"), ("log_format",)),
    OptionGroup(
        "expert",
        "Expert",
        (),
        (
            *("length_predictor", "length_predictor_model", "length_predictor_entries", "length_corpus"),
            *("prefill_window", "batch_share", "min_batch_requests", "near_share", "starvation_s"),
            *("be_pace", "rt_stretch", "admit_ahead", "orphan_s"),
        ),
    ),
)
DOCTOR = (OptionGroup("doctor", "Output and running servers", ("url", "is_json")), *SERVE)
GENERATE = (
    OptionGroup("prompts", "Prompts", ("prompts", "chat", "max_tokens", "temperature", "lora_name")),
    *_ENGINE,
)
PROFILE = (OptionGroup("profile", "Profile", ("seconds", "out", "pool_kv_dtype")), *_ENGINE)
BENCH_ENGINE = (
    OptionGroup("workload", "Workload", ("num_prompts", "input_len", "output_len", "mix", "runs", "out")),
    *_ENGINE,
)
BENCH_SERVE = (
    OptionGroup("server", "Server", ("base_url", "model", "api_key")),
    OptionGroup("requests", "Requests", ("dataset_name", "dataset_path", "num_prompts", "be_share")),
    OptionGroup("arrivals", "Arrivals", ("request_rate", "max_concurrency")),
    OptionGroup("results", "Results", ("goodput", "save_result", "plot")),
)
BENCH_COMPARE = (
    OptionGroup("servers", "Servers", ("label", "api_key", "model")),
    OptionGroup("chat", "Chat", ("dataset_name", "num_prompts", "request_rate", "goodput"), ("num_warmups",)),
    OptionGroup("batch", "Batch job", ("job_lines", "job_input_len", "job_output_len")),
    OptionGroup("results", "Results", ("output", "plot")),
)
SIMULATE = (
    OptionGroup(
        "cluster",
        "Cluster",
        ("cost", "policy", "prefill_instances", "decode_instances", "colocated_instances"),
        ("link", "change_roles"),
    ),
    OptionGroup("traffic", "Traffic", ("trace", "num_prompts", "request_rate", "input_len", "output_len")),
    OptionGroup("batch", "Best effort", ("be_share", "be_backlog")),
    OptionGroup(
        "latency", "Latency and objectives", ("slo_ttft_ms", "slo_tbt_ms", "find_rate"), ("attainment",)
    ),
    OptionGroup("results", "Results", ("output", "plot")),
    OptionGroup("memory", "Memory", ("max_model_len",), ("pool_memory_bytes", "pool_kv_dtype", *_POOL_FIRST)),
    OptionGroup("limits", "Limits", ("max_num_seqs",)),
    OptionGroup("expert", "Expert"),
)

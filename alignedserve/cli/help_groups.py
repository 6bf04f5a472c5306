"""The groups of options that help shows, for the commands with many. Each option is in one group of its command.

The first tuple of a group is what a bare `--help` shows. Names are those of parameters.
"""

from __future__ import annotations

from alignedserve.cli.command import OptionGroup

_MODEL = OptionGroup(
    "model",
    "Model",
    ("max_model_len", "quantization", "lora_modules"),
    (
        *(
            "dtype",
            "device",
            "tensor_parallel_size",
            "load_format",
            "revision",
            "tokenizer",
            "skip_tokenizer_init",
        ),
        *("allow_special_tokens_in_messages", "enable_lora", "max_loras", "max_lora_rank", "seed"),
    ),
)
_MEMORY = OptionGroup(
    "memory",
    "Memory",
    ("kv_cache_memory_bytes", "gpu_memory_utilization"),
    ("kv_cache_dtype", "block_size", "enable_prefix_caching", "hidden_cache"),
)
_BATCHING = OptionGroup(
    "limits",
    "Limits",
    ("max_num_seqs", "max_num_batched_tokens"),
    ("max_prefill_chunk",),
)
_KERNELS = OptionGroup(
    "expert",
    "Expert",
    (),
    ("attention_backend", "decode_kernel", "enforce_eager", "cudagraph_capture_sizes"),
)
_PROGRESS = OptionGroup("operation", "Operation", (), ("use_tqdm",))
_ENGINE = (_MODEL, _MEMORY, _BATCHING, _PROGRESS, _KERNELS)

SERVE = (
    OptionGroup(
        "model",
        "Model",
        ("served_model_name", *_MODEL.main),
        (*_MODEL.others, "lora_modules_from", "embedding_pooling"),
    ),
    OptionGroup(
        "latency",
        "Latency and objectives",
        ("slo_ttft_ms", "slo_tbt_ms", "policy"),
        ("slo_priority_ttft_ms", "slo_priority_tbt_ms", "cost_profile", "chunk_share", "rt_headroom"),
    ),
    OptionGroup(
        "batch",
        "Batch jobs",
        ("be_share", "state_dir", "redis_url"),
        (
            *("files_at", "batch_max_num_lines", "batch_inputs_from", "shared_files"),
            *("webhook_url", "webhook_allowed_urls", "webhook_secret_file", "webhook_allow_private"),
        ),
    ),
    OptionGroup(
        "memory",
        "Memory",
        (*_MEMORY.main, "pool_memory_bytes"),
        (
            "pool_kv_dtype",
            "pool_promised_share",
            "verify_blocks",
            *_MEMORY.others,
            "share_blocks",
            "preemption_mode",
        ),
    ),
    OptionGroup(
        "instances",
        "Instances and hosts",
        ("prefill_instances", "decode_instances", "colocated_instances", "address"),
        ("min_islands", "max_islands", "gateways", "island_gateways", "change_roles", "link"),
    ),
    OptionGroup(
        "limits",
        "Limits",
        ("max_num_seqs", "max_num_queued_reqs"),
        (
            *(
                "max_requests_per_key",
                "max_num_batched_tokens",
                "max_prefill_chunk",
                "max_num_queued_tokens",
                "max_connections",
            ),
            *("max_body_bytes", "max_total_body_bytes", "max_prompt_tokens", "max_call_tokens"),
            *("max_choices", "max_logprobs", "max_stop_strings", "max_stop_chars", "max_token_ids"),
            *("max_grammar_bytes", "grammar_timeout_s", "max_open_batches", "max_open_batches_per_key"),
            *("max_file_bytes", "max_stored_bytes", "max_stored_bytes_per_key"),
            *("max_files_at_bytes", "max_files_at_bytes_per_key"),
        ),
    ),
    OptionGroup(
        "network",
        "Network and access",
        ("host", "port", "api_key", "api_key_file"),
        (
            *("operator_key", "operator_key_file", "allow_no_auth"),
            *("allowed_origins", "allowed_hosts", "strict_parameters"),
        ),
    ),
    OptionGroup(
        "operation",
        "Operation",
        ("log_level", "log_dir"),
        ("log_format", "shutdown_timeout", "otlp_endpoint", "event_log", "silence_s"),
    ),
    OptionGroup(
        "expert",
        "Expert",
        (),
        (
            *("length_predictor", "length_predictor_model", "length_predictor_entries", "length_corpus"),
            *("prefill_window", "batch_share", "min_batch_requests", "near_share", "starvation_s"),
            *("be_pace", "rt_stretch", "admit_ahead", "orphan_s", *_KERNELS.options),
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
    OptionGroup(
        "server",
        "Server",
        ("base_url", "model", "api_key"),
        ("host", "port", "backend", "endpoint", "tokenizer", "request_timeout_s"),
    ),
    OptionGroup(
        "requests",
        "Requests",
        ("dataset_name", "dataset_path", "num_prompts", "be_share"),
        (
            *("random_input_len", "random_output_len", "random_range_ratio", "custom_output_len"),
            *("temperature", "ignore_eos", "seed"),
        ),
    ),
    OptionGroup("arrivals", "Arrivals", ("request_rate", "max_concurrency"), ("burstiness", "trace_speed")),
    OptionGroup(
        "results",
        "Results",
        ("goodput", "save_result", "plot"),
        (
            *("percentile_metrics", "metric_percentiles", "save_detailed", "result_dir"),
            *("result_filename", "label", "disable_tqdm"),
        ),
    ),
)
BENCH_COMPARE = (
    OptionGroup("servers", "Servers", ("label", "api_key", "model"), ("request_timeout_s",)),
    OptionGroup(
        "chat",
        "Chat",
        ("dataset_name", "num_prompts", "request_rate", "goodput"),
        ("num_warmups", "dataset_path", "input_len", "output_len", "temperature", "ignore_eos", "seed"),
    ),
    OptionGroup(
        "batch",
        "Batch job",
        ("job_lines", "job_input_len", "job_output_len"),
        ("job_concurrency", "job_warmup_s"),
    ),
    OptionGroup("results", "Results", ("output", "plot")),
)
SIMULATE = (
    OptionGroup(
        "cluster",
        "Cluster",
        ("cost", "policy", "prefill_instances", "decode_instances", "colocated_instances"),
        ("link", "change_roles", "attention"),
    ),
    OptionGroup(
        "traffic",
        "Traffic",
        ("trace", "num_prompts", "request_rate", "input_len", "output_len"),
        ("trace_start", "burstiness", "spread", "seed"),
    ),
    OptionGroup(
        "batch",
        "Best effort",
        ("be_share", "be_backlog"),
        ("be_window_s", "be_input_len", "be_output_len", "warmup_s", "be_min_share"),
    ),
    OptionGroup(
        "latency",
        "Latency and objectives",
        ("slo_ttft_ms", "slo_tbt_ms", "find_rate"),
        ("attainment", "slo_mix", "length_predictor"),
    ),
    OptionGroup("results", "Results", ("output", "plot")),
    OptionGroup(
        "memory",
        "Memory",
        ("max_model_len",),
        (
            *("pool_memory_bytes", "pool_kv_dtype", "kv_cache_dtype", "block_size", "enable_prefix_caching"),
            *("hidden_cache", "share_blocks", "preemption_mode"),
        ),
    ),
    OptionGroup(
        "limits",
        "Limits",
        ("max_num_seqs",),
        ("max_num_batched_tokens", "max_num_queued_reqs", "max_num_queued_tokens"),
    ),
    OptionGroup(
        "expert",
        "Expert",
        (),
        (
            *("shared_links", "gpus_per_pcie_root", "host_memory_bandwidth", "pace", "outside_ms"),
            *("prefill_window", "batch_share", "min_batch_requests", "near_share", "starvation_s"),
            *("rt_headroom", "chunk_share", "be_pace", "rt_stretch", "admit_ahead"),
        ),
    ),
)

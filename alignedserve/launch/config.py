"""What `alignedserve serve` can be told, besides the engine's and the router's options. The text is its help."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Annotated

from alignedserve.lengths.config import KINDS, MAX_ENTRIES
from alignedserve.process.logs import FORMATS, LEVELS, LogConfig


@dataclass(frozen=True)
class ServeConfig:
    host: Annotated[str, "address of the HTTP endpoint"] = "127.0.0.1"
    port: Annotated[int, "port of the HTTP endpoint"] = 8000
    served_model_name: Annotated[str | None, "the model's name to clients [default: as it was given]"] = None
    prefill_instances: Annotated[
        int | None, "of each island; one GPU each where there are GPUs [default: 1]"
    ] = None
    decode_instances: Annotated[int | None, "likewise [default: 1]"] = None
    colocated_instances: Annotated[
        int | None, "instead of those, each computes prompts and decodes [default: 1 where there is one GPU]"
    ] = None
    pool_memory_bytes: Annotated[
        int | None, "shared memory of each island for KV [default: 1 GiB at most]"
    ] = None
    address: Annotated[
        str | None, "of a Ray cluster to join: its nodes become islands [default: Ray on this machine]"
    ] = None
    num_islands: Annotated[int | None, "nodes of the cluster to use, and to wait for [default: all]"] = None
    api_key: Annotated[
        tuple[str, ...],
        "clients must send one of these; repeat for several (others see them in ps: use a file)",
    ] = field(default=(), repr=False)
    api_key_file: Annotated[str | None, "file of API keys, one a line, and after it, if any, its group"] = (
        None
    )
    shared_files: Annotated[bool, "each API key sees all files and batches, whoever made them"] = False
    allowed_origins: Annotated[
        tuple[str, ...], "whose pages may call it from a browser (CORS), or *: any; repeat for several"
    ] = ()
    allowed_hosts: Annotated[
        tuple[str, ...],
        "names that it is known by, besides its addresses, or *: any; repeat for several "
        "[default: with API keys any]",
    ] = ()
    allow_no_auth: Annotated[bool, "listen beyond this machine without API keys"] = False
    shutdown_timeout: Annotated[float, "seconds that running requests get to finish when it is stopped"] = (
        30.0
    )
    redis_url: Annotated[
        str | None, "Redis that keeps files and batch jobs [default: a private one, in the state directory]"
    ] = None
    state_dir: Annotated[
        str | None, "directory of the private Redis [default: ~/.local/state/alignedserve]"
    ] = None
    slo_ttft_ms: Annotated[
        float, "first token of requests that name no objective is due after so long; 0: whenever"
    ] = 1000.0
    slo_tbt_ms: Annotated[float, "each further token, after the one before"] = 100.0
    slo_priority_ttft_ms: Annotated[float, "the same for service_tier=priority"] = 500.0
    slo_priority_tbt_ms: Annotated[float, "the same for service_tier=priority"] = 50.0
    batch_max_num_lines: Annotated[int, "lines of batch jobs that run at a time"] = 64
    length_predictor: Annotated[
        str, "what foresees how long answers will be: hash, sentence (embeddings) or none"
    ] = "hash"
    length_predictor_model: Annotated[
        str | None, "of sentence embeddings, a directory or a name [default: all-MiniLM-L6-v2]"
    ] = None
    length_predictor_entries: Annotated[int, "past prompts that the length predictor keeps"] = MAX_ENTRIES
    cost_profile: Annotated[
        str | None,
        "file of the cost model's profile, made if there is none; or none: deadlines without foresight "
        "[default: in ~/.cache/alignedserve/profiles]",
    ] = None
    event_log: Annotated[str | None, "directory to write the router's events to, for replay"] = None
    log_format: Annotated[str, "of every process: text or json, a line each, with the request's id"] = "text"
    log_level: Annotated[str, "debug (each request's way through each process), info, warning or error"] = (
        "info"
    )
    log_dir: Annotated[
        str | None, "directory of log files, one for each process [default: stderr only, by way of Ray]"
    ] = None
    otlp_endpoint: Annotated[str | None, "where OpenTelemetry traces go, over HTTP [default: nowhere]"] = None

    def __post_init__(self) -> None:
        apart = ("prefill_instances", "decode_instances")
        for name in (*apart, "colocated_instances"):
            if (count := getattr(self, name)) is not None:
                _in_range(name, count, 1, 1024)
        for name in apart:
            if self.colocated_instances is not None and getattr(self, name) is not None:
                raise ValueError(
                    f"colocated_instances={self.colocated_instances} and {name}={getattr(self, name)}: "
                    "an island has one or the other"
                )
        if not self.shutdown_timeout >= 0:
            raise ValueError(f"shutdown_timeout={self.shutdown_timeout}: must be at least 0")
        has_keys = self.api_key or self.api_key_file is not None
        if not has_keys and not self.allow_no_auth and not is_loopback(self.host):
            raise ValueError(
                f"host={self.host!r}: anyone who reaches it could use it; give an --api-key or --api-key-file, "
                "or say --allow-no-auth"
            )
        for origin in self.allowed_origins:
            if not re.fullmatch(r"\*|[a-z][a-z0-9+.-]*://[^/\s]+", origin):
                raise ValueError(
                    f"allowed_origins={origin!r}: must be *, or scheme, host and port, like https://example.org"
                )
        for host in self.allowed_hosts:
            if not re.fullmatch(r"\*|[A-Za-z0-9._-]+|\[?[0-9A-Fa-f]*:[0-9A-Fa-f]*:[0-9A-Fa-f:.]*\]?", host):
                raise ValueError(
                    f"allowed_hosts={host!r}: must be *, or a name or an address, without a port"
                )
        if self.served_model_name == "":
            raise ValueError("served_model_name='': must not be empty")
        _in_range("port", self.port, 1, 65535)
        _in_range("batch_max_num_lines", self.batch_max_num_lines, 1, 65536)
        choices = (("log_format", FORMATS), ("log_level", LEVELS), ("length_predictor", KINDS))
        for name, allowed in choices:
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r}: must be one of {', '.join(allowed)}")
        _in_range("length_predictor_entries", self.length_predictor_entries, 1, 1 << 20)
        if self.otlp_endpoint is not None and not self.otlp_endpoint.startswith(("http://", "https://")):
            raise ValueError(f"otlp_endpoint={self.otlp_endpoint!r}: must begin with http:// or https://")
        if self.num_islands is not None:
            _in_range("num_islands", self.num_islands, 1, 1024)
            if self.num_islands > 1 and self.address is None:
                raise ValueError(
                    f"num_islands={self.num_islands}: this machine is one island; give the --address of a Ray cluster"
                )
        if self.pool_memory_bytes is not None:
            _in_range("pool_memory_bytes", self.pool_memory_bytes, 1, 2**63 - 1)

    def instances(self, num_gpus: int = 0) -> dict[str, int]:
        """How many of each role an island has with so many GPUs. One alone would hold the weights twice if two
        instances shared it."""
        has_no_say = self.prefill_instances is None and self.decode_instances is None
        if self.colocated_instances is not None or (has_no_say and num_gpus == 1):
            return {"colocated": self.colocated_instances or 1}
        return {"prefill": self.prefill_instances or 1, "decode": self.decode_instances or 1}

    @property
    def log(self) -> LogConfig:
        # other processes need not be where this one is
        directory = None if self.log_dir is None else os.path.abspath(os.path.expanduser(self.log_dir))
        return LogConfig(self.log_format, self.log_level, directory)


def is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        # a name: where it leads is not known
        return False


def _in_range(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ValueError(f"{name}={value}: must be from {low} to {high}")

"""What `alignedserve serve` can be told, besides the engine's and the router's options. The text is its help."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from alignedserve.logs import FORMATS


@dataclass(frozen=True)
class ServeConfig:
    host: Annotated[str, "address of the HTTP endpoint"] = "127.0.0.1"
    port: Annotated[int, "port of the HTTP endpoint"] = 8000
    served_model_name: Annotated[str | None, "the model's name to clients [default: as it was given]"] = None
    prefill_instances: Annotated[int, "of each island; one GPU each where there are GPUs"] = 1
    decode_instances: Annotated[int, "of each island; one GPU each where there are GPUs"] = 1
    pool_memory_bytes: Annotated[
        int | None, "shared memory of each island for KV [default: 1 GiB at most]"
    ] = None
    address: Annotated[
        str | None, "of a Ray cluster to join: its nodes become islands [default: Ray on this machine]"
    ] = None
    num_islands: Annotated[int | None, "nodes of the cluster to use, and to wait for [default: all]"] = None
    event_log: Annotated[str | None, "directory to write the router's events to, for replay"] = None
    log_format: Annotated[str, "text or json, a line each, with the request's id"] = "text"
    log_file: Annotated[str | None, "for the gateway's log [default: stderr, by way of Ray]"] = None
    otlp_endpoint: Annotated[str | None, "where OpenTelemetry traces go, over HTTP [default: nowhere]"] = None

    def __post_init__(self) -> None:
        for name in ("prefill_instances", "decode_instances"):
            _in_range(name, getattr(self, name), 1, 1024)
        _in_range("port", self.port, 1, 65535)
        if self.log_format not in FORMATS:
            raise ValueError(f"log_format={self.log_format!r}: must be one of {', '.join(FORMATS)}")
        if self.otlp_endpoint is not None and not self.otlp_endpoint.startswith(("http://", "https://")):
            raise ValueError(f"otlp_endpoint={self.otlp_endpoint!r}: must begin with http:// or https://")
        if self.num_islands is not None:
            _in_range("num_islands", self.num_islands, 1, 1024)
        if self.pool_memory_bytes is not None:
            _in_range("pool_memory_bytes", self.pool_memory_bytes, 1, 2**63 - 1)


def _in_range(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ValueError(f"{name}={value}: must be from {low} to {high}")

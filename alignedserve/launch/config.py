"""Settings of the launcher: the instances of each island, the cluster, and where files and jobs are kept. The text
beside a field is its help on the command line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from alignedserve.kv.format import POOL_KV_DTYPES, check_verify_blocks
from alignedserve.protocol.messages import MAX_PROMISED_SHARE
from alignedserve.store.homes import parse_place

MAX_GATEWAYS = 64


@dataclass(frozen=True)
class LaunchConfig:
    prefill_instances: Annotated[
        int | None,
        "prefill instances per island, each with its own GPU if there are any [default: 1]",
        "instances",
    ] = None
    decode_instances: Annotated[int | None, "decode instances per island [default: 1]"] = None
    colocated_instances: Annotated[
        int | None,
        "instances that prefill and decode, in place of both kinds above [default: 1 on a machine with one GPU]",
    ] = None
    gateways: Annotated[int, "HTTP processes, all at the same port"] = 1
    island_gateways: Annotated[
        bool,
        "run a gateway on the host of each island as well; needs --host 0.0.0.0 and --redis-url",
    ] = False
    pool_memory_bytes: Annotated[
        int | None,
        "shared memory of each island's KV pool [default: 1 GiB, at least one request of --max-model-len, at most half "
        "of the free memory]",
        "memory",
    ] = None
    pool_kv_dtype: Annotated[
        str,
        "dtype of KV in the pool; auto is that of instances, int8 halves its size and rounds",
        tuple(POOL_KV_DTYPES),
    ] = "auto"
    verify_blocks: Annotated[
        float,
        "share of the KV blocks loaded from the pool that are compared with checksums of what was saved; 0 is none",
    ] = 0.0
    pool_promised_share: Annotated[
        float,
        "maximum share of the KV pool that is promised to the next turns of one API key's chats, up to 0.5; 0 promises "
        "none",
    ] = 0.25
    address: Annotated[
        str | None,
        "address of a Ray cluster; its nodes become islands [default: this machine alone]",
        "instances",
    ] = None
    min_islands: Annotated[int, "nodes of the cluster to wait for at the start"] = 1
    max_islands: Annotated[
        int | None,
        "maximum nodes of the cluster to use; with a resource called island, Ray's autoscaler adds them as traffic "
        "grows [default: all]",
    ] = None
    redis_url: Annotated[
        str | None,
        "Redis for files and batch jobs: redis://, rediss:// or redis+sentinel:// "
        "[default: a private one in --state-dir]",
        "batch",
    ] = None
    state_dir: Annotated[
        str | None,
        "directory of the private Redis, which keeps files and batch jobs [default: ~/.local/state/alignedserve]",
    ] = None
    files_at: Annotated[
        str | None, "directory or s3://BUCKET/PREFIX for the content of files [default: Redis]"
    ] = None
    lora_modules_from: Annotated[
        tuple[str, ...],
        "directory below which /v1/load_lora_adapter may read adapters; repeat for more; needs --max-loras",
        "model",
    ] = ()
    cost_profile: Annotated[
        str | None,
        "file of the cost model's profile, measured if it does not exist; none schedules without a cost model "
        "[default: in ~/.cache/alignedserve/profiles]",
        "latency",
    ] = None
    event_log: Annotated[
        str | None, "directory for a log of the router's events, which can be replayed", "operation"
    ] = None

    def __post_init__(self) -> None:
        apart = ("prefill_instances", "decode_instances")
        for name in (*apart, "colocated_instances", "min_islands", "max_islands"):
            _in_range(name, getattr(self, name), 1, 1024)
        _in_range("gateways", self.gateways, 1, MAX_GATEWAYS)
        _in_range("pool_memory_bytes", self.pool_memory_bytes, 1, 2**63 - 1)
        if self.pool_kv_dtype not in POOL_KV_DTYPES:
            raise ValueError(
                f"pool_kv_dtype={self.pool_kv_dtype!r}: must be one of {', '.join(POOL_KV_DTYPES)}"
            )
        check_verify_blocks(self.verify_blocks)
        if not 0.0 <= self.pool_promised_share <= MAX_PROMISED_SHARE:
            raise ValueError(
                f"pool_promised_share={self.pool_promised_share}: must be from 0 to {MAX_PROMISED_SHARE}"
            )
        _check_place(self.files_at)
        for name in apart:
            if self.colocated_instances is not None and getattr(self, name) is not None:
                raise ValueError(
                    f"colocated_instances={self.colocated_instances} and {name}={getattr(self, name)}: "
                    "choose one"
                )
        if self.max_islands is not None and self.max_islands < self.min_islands:
            raise ValueError(
                f"max_islands={self.max_islands}: must be at least min_islands={self.min_islands}"
            )
        if self.island_gateways and self.address is None:
            raise ValueError(
                "island_gateways: this machine is one island; give the --address of a Ray cluster"
            )
        if self.island_gateways and self.redis_url is None:
            raise ValueError("island_gateways: the private Redis is for one host; give a --redis-url")
        if self.min_islands > 1 and self.address is None:
            raise ValueError(
                f"min_islands={self.min_islands}: this machine is one island; give the --address of a Ray cluster"
            )

    def instances(self, num_gpus: int = 0) -> dict[str, int]:
        """Returns the number of instances of each role on an island with `num_gpus` GPUs. With one GPU there is one
        colocated instance, because two that share the GPU would hold the weights twice."""
        has_no_say = self.prefill_instances is None and self.decode_instances is None
        if self.colocated_instances is not None or (has_no_say and num_gpus == 1):
            return {"colocated": self.colocated_instances or 1}
        return {"prefill": self.prefill_instances or 1, "decode": self.decode_instances or 1}


def _in_range(name: str, value: int | None, low: int, high: int) -> None:
    if value is not None and not low <= value <= high:
        raise ValueError(f"{name}={value}: must be from {low} to {high}")


def _check_place(files_at: str | None) -> None:
    if files_at is not None:
        try:
            parse_place(files_at)
        except ValueError as error:
            raise ValueError(f"files_at={files_at!r}: {error}") from None

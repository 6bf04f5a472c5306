"""The gateway's settings, which are frozen. The text beside a field is its help on the command line."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Annotated

from alignedserve.batch.config import BatchConfig
from alignedserve.engine.config import EngineConfig
from alignedserve.gateway.limits.limits import CallLimits, SloConfig
from alignedserve.gateway.webhooks.config import WebhookConfig
from alignedserve.lengths.config import LengthConfig
from alignedserve.process.logs import LogConfig
from alignedserve.protocol.address import RouterAddress
from alignedserve.protocol.pooling import POOLINGS
from alignedserve.types import InstanceId


@dataclass(frozen=True)
class HttpConfig:
    host: Annotated[str, "address of the HTTP server", "network"] = "127.0.0.1"
    port: Annotated[int, "port of the HTTP server"] = 8000
    served_model_name: Annotated[str | None, "name of the model for clients [default: as given]", "model"] = (
        None
    )
    strict_parameters: Annotated[
        bool, "refuse unknown request parameters instead of ignoring them", "network"
    ] = False
    embedding_pooling: Annotated[
        str, "an embedding is the state of the last token, or the mean over all tokens", POOLINGS, "model"
    ] = POOLINGS[0]
    shared_files: Annotated[bool, "show all files and batches to every API key", "batch"] = False
    allowed_origins: Annotated[
        tuple[str, ...],
        "origin of pages that may call the server from a browser (CORS), or * for any; repeat for more",
        "network",
    ] = ()
    allowed_hosts: Annotated[
        tuple[str, ...],
        "name under which clients may reach the server, or * for any; repeat for more "
        "[default: its addresses; any with API keys]",
    ] = ()
    shutdown_timeout: Annotated[
        float, "seconds that running requests have to finish at shutdown", "operation"
    ] = 30.0
    otlp_endpoint: Annotated[str | None, "URL of an OTLP collector for traces, over HTTP [default: none]"] = (
        None
    )

    def __post_init__(self) -> None:
        if not 1 <= self.port <= 65535:
            raise ValueError(f"port={self.port}: must be from 1 to 65535")
        if self.served_model_name == "":
            raise ValueError("served_model_name='': must not be empty")
        if self.embedding_pooling not in POOLINGS:
            raise ValueError(
                f"embedding_pooling={self.embedding_pooling!r}: must be one of {', '.join(POOLINGS)}"
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
        if not self.shutdown_timeout >= 0:
            raise ValueError(f"shutdown_timeout={self.shutdown_timeout}: must be at least 0")
        if self.otlp_endpoint is not None and not self.otlp_endpoint.startswith(("http://", "https://")):
            raise ValueError(f"otlp_endpoint={self.otlp_endpoint!r}: must begin with http:// or https://")

    def check_traces(self) -> None:
        """Raises ValueError if traces are asked for and what sends them is not installed."""
        if self.otlp_endpoint is None:
            return
        try:
            import alignedserve.gateway.telemetry.traces  # noqa: F401
        except ImportError as error:
            raise ValueError(
                f"otlp_endpoint: needs OpenTelemetry; pip install 'alignedserve[otel]' ({error})"
            ) from None

    @property
    def is_on_loopback(self) -> bool:
        try:
            return self.host == "localhost" or ip_address(self.host).is_loopback
        except ValueError:
            # It is a host name, which may resolve to any address.
            return False

    @property
    def is_on_all_interfaces(self) -> bool:
        try:
            return ip_address(self.host).is_unspecified
        except ValueError:
            return False


@dataclass(frozen=True)
class KeyConfig:
    """Clients' and operators' keys. Only the launcher reads them; the gateway receives their digests."""

    api_key: Annotated[
        tuple[str, ...],
        "API key that clients must send; repeat for more. It is visible in ps, a file is not",
        "network",
    ] = field(default=(), repr=False)
    api_key_file: Annotated[
        str | None, "file of API keys, one a line, each optionally followed by its group"
    ] = None
    operator_key: Annotated[
        tuple[str, ...],
        "key that may also read the counts of all clients (/metrics) and change the server for all; repeat for more",
    ] = field(default=(), repr=False)
    operator_key_file: Annotated[str | None, "file of operators' keys, like --api-key-file"] = None
    allow_no_auth: Annotated[bool, "allow a public address without API keys"] = False

    @property
    def has_files(self) -> bool:
        """Whether the keys may change while the server runs."""
        return self.api_key_file is not None or self.operator_key_file is not None

    @property
    def lists(self) -> tuple[tuple[str, ...], str | None, tuple[str, ...], str | None]:
        """The arguments of owners_of."""
        return self.api_key, self.api_key_file, self.operator_key, self.operator_key_file

    def check(self, http: HttpConfig) -> None:
        """Raises ValueError if the server would be open to other machines without API keys and without
        `--allow-no-auth`."""
        has_keys = self.api_key or self.operator_key or self.has_files
        if not has_keys and not self.allow_no_auth and not http.is_on_loopback:
            raise ValueError(
                f"host={http.host!r}: reachable from other machines without an API key; give --api-key or "
                "--api-key-file, or --allow-no-auth"
            )


@dataclass(frozen=True)
class GatewayConfig:
    instance_id: InstanceId
    # The address of each island's router when the gateway starts.
    routers: tuple[RouterAddress, ...]
    engine: EngineConfig
    # The model's name to clients.
    model_name: str
    http: HttpConfig = field(default_factory=HttpConfig)
    # Settings that have to be equal in all processes of the cluster.
    fingerprint: Mapping[str, str] = field(default_factory=dict)
    limits: CallLimits = field(default_factory=CallLimits)
    # Owners by the digest of their API key (http/keys.py). Empty: the server needs no key.
    key_owners: Mapping[bytes, str] = field(default_factory=dict)
    # Whether the launcher reads the keys from a file, which may change.
    keys_may_change: bool = False
    # URL of the store for files, batch jobs and responses. Empty: no store.
    store_url: str = ""
    # Where the contents of files are kept: a directory, or s3://BUCKET/PREFIX. None: in the store.
    files_at: str | None = None
    batches: BatchConfig = field(default_factory=BatchConfig)
    log: LogConfig = field(default_factory=LogConfig)
    lengths: LengthConfig = field(default_factory=LengthConfig)
    slo: SloConfig = field(default_factory=SloConfig)
    webhooks: WebhookConfig = field(default_factory=WebhookConfig)
    # Secrets that sign webhooks.
    webhook_secrets: tuple[bytes, ...] = field(default=(), repr=False)
    # Address of the launcher, which reports the current islands. None: the islands are those of `routers`, always.
    launcher: RouterAddress | None = None
    # Path of the Unix socket at which the launcher passes the listening socket. None: the gateway opens its own.
    control: str | None = None
    # Number of gateways that listen at the same port.
    num_gateways: int = 1
    # The number of the first island in `routers`; the others follow it.
    first_island: int = 0
    # Whether there are gateways on the islands' hosts.
    has_island_gateways: bool = False

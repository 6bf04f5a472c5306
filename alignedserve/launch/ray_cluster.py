"""Ray for one system: its own on this machine, on loopback and behind a token, or an existing cluster that it joins.

What Ray 2.60 was seen to do, and to which its configuration here is the answer:
- it listens on all interfaces, `_node_ip_address="127.0.0.1"` notwithstanding, unless clusters are off: the variable
  is named after the systems where they are off by default;
- RAY_AUTH_TOKEN keeps it from writing a token to the home directory;
- any user may write in its directory, whatever the umask is, so that is inside one of ours;
- its ports, of which each of our processes has one, take messages of 512 MB whole before they check the token, and a
  process that gets the port of a part of Ray that died is sent the token. With TLS, which Ray has on request, both
  ends need the key of this system, so no other process gets that far;
- its autoscaler, which has nothing to do here, serves metrics without a token, at a port that can only be moved: to
  one that does not exist;
- `num_cpus` workers are started ahead, which saves most of an actor's start and restart: one for each process;
- it reports at length, and repeatedly, that a worker died (console.py leaves that out);
- it colours the lines of workers, also in files, and prints one line for several that are alike;
- its memory monitor kills workers when the machine is 95 % full, whichever process filled it;
- its workers run at nice 15: behind whatever else the machine does, and hardly ahead of instances on a CPU, which are
  nicer still and can only get to 19. A gateway then waited half as long for a core as it ran.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from alignedserve.launch.certificate import make_certificate
from alignedserve.launch.leftovers import descendants, end

# The fewest bytes that Ray accepts. Nothing of ours goes through its object store.
OBJECT_STORE_BYTES = 80 << 20


@contextmanager
def local_ray(directory: Path, num_processes: int, num_threads: int) -> Iterator[Any]:
    """Yields the ray module, for a Ray that ends with the block and leaves no process. `directory` is for this user
    alone. `num_threads` is the number of threads of an instance on a CPU, where the environment sets none."""
    tls = make_certificate(directory)
    os.environ.update(
        RAY_AUTH_MODE="token",
        RAY_AUTH_TOKEN=secrets.token_hex(32),
        RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0",
        RAY_USAGE_STATS_ENABLED="0",
        RAY_memory_monitor_refresh_ms="0",
        RAY_worker_niceness="0",
        RAY_USE_TLS="1",
        RAY_TLS_SERVER_CERT=str(tls.certificate),
        RAY_TLS_SERVER_KEY=str(tls.key),
        RAY_TLS_CA_CERT=str(tls.certificate),
        AUTOSCALER_METRIC_PORT="-1",
    )
    # Otherwise every attempt of a stranger on its ports would be printed on the terminal.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    os.environ.setdefault("OMP_NUM_THREADS", str(num_threads))
    before = set(descendants(os.getpid()))
    try:
        ray = _init(
            address="local",
            num_cpus=num_processes,
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            _temp_dir=str(directory / "ray"),
        )
        yield ray
    finally:
        ours = set(descendants(os.getpid())) - before
        _shutdown()
        end(ours)


@contextmanager
def joined_ray(address: str) -> Iterator[Any]:
    """Yields the ray module, connected to a cluster. Ray finds the token in its usual places. Raises ValueError."""
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    try:
        yield _join(address)
    finally:
        _shutdown()


def directory_of(ray: Any) -> Path:
    """Returns the directory in which Ray keeps its files on this machine."""
    return Path(ray._private.worker._global_node.get_session_dir_path())


def _join(address: str) -> Any:
    from ray.exceptions import RayError

    try:
        return _init(address=address)
    except (ConnectionError, RayError) as error:
        raise ValueError(f"address={address!r}: {error}") from error


def _init(**options: Any) -> Any:
    os.environ.update(RAY_COLOR_PREFIX="0", RAY_DEDUP_LOGS="0")
    # It is imported here, since its native part reads the environment when it is imported.
    import ray

    # Ray's processes inherit the blocked SIGHUP: when a terminal closes, only this process is to react, which ends
    # them when all requests have ended. (Ray does the same with SIGINT.) A signal that comes meanwhile is delivered
    # afterwards.
    old = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    try:
        ray.init(logging_level=logging.ERROR, **options)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old)
    return ray


def _shutdown() -> None:
    import ray

    # Ray's native part restores the default action of SIGTERM.
    handler = signal.getsignal(signal.SIGTERM)
    ray.shutdown()
    signal.signal(signal.SIGTERM, handler)

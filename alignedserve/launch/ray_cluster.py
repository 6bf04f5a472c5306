"""Ray for one system: its own on this machine, on loopback and behind a token, or an existing cluster that it joins.

The configuration here answers what Ray 2.60 does:
- It listens on all interfaces in spite of `_node_ip_address="127.0.0.1"`, unless clusters are off. The variable for
  that is named after the systems where they are off by default.
- RAY_AUTH_TOKEN keeps it from writing a token to the home directory.
- Any user may write in its directory, whatever the umask is. So the directory is inside one of ours.
- Each process has a port that takes messages of 512 MB before it checks the token. A process that gets the port of a
  dead part of Ray is sent the token. With TLS both ends need the key of this system, so no other process gets that far.
- Its autoscaler is not used here, but serves metrics without a token. Its port can only be moved: to one that does not
  exist.
- `num_cpus` workers are started ahead, one for each process. That saves most of an actor's start and restart.
- It reports at length, and repeatedly, that a worker died. console.py leaves that out.
- It colours the lines of workers, also in files, and prints one line for several that are alike.
- Its memory monitor kills workers when the machine is 95 % full, whichever process filled it.
- Its workers run at nice 15, behind everything else on the machine. Instances on a CPU are nicer still, but 19 is the
  limit. A gateway then waited for a core half as long as it ran.
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
from alignedserve.launch.first_process import hear_nothing
from alignedserve.launch.leftovers import descendants, end

# the fewest bytes that Ray accepts; its object store is not used
OBJECT_STORE_BYTES = 80 << 20


@contextmanager
def local_ray(directory: Path, num_processes: int, num_threads: int) -> Iterator[Any]:
    """Yields the ray module, for a Ray that ends with the block and leaves no process. Only this user may have access
    to `directory`. `num_threads` is the number of threads of an instance on a CPU, if the environment does not set
    it."""
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
    # Otherwise each attempt of another program on its ports would be printed.
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
    # Ray is imported here, because its native part reads the environment during the import.
    import ray

    # Ray's processes inherit the blocked SIGHUP. When a terminal closes, only this process reacts, and ends them when
    # all requests have ended. Ray does the same with SIGINT. A signal that arrives meanwhile is delivered afterwards.
    old = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    try:
        ray.init(logging_level=logging.ERROR, **options)
        # Ray has installed its own handler, which raises SystemExit.
        hear_nothing()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old)
    return ray


def _shutdown() -> None:
    import ray

    # Ray's native part restores the default action of SIGTERM.
    handler = signal.getsignal(signal.SIGTERM)
    ray.shutdown()
    signal.signal(signal.SIGTERM, handler)

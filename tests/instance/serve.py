"""An instance of a test: `python -m tests.instance.serve ROLE INSTANCE_ID PORT TOKEN MODEL`. Light to import."""

from __future__ import annotations

import sys

from alignedserve.decode_worker.process import DecodeProcess
from alignedserve.engine.config import EngineConfig
from alignedserve.instance.config import InstanceConfig
from alignedserve.instance.process import InstanceProcess
from alignedserve.prefill_worker.process import PrefillProcess
from alignedserve.protocol.address import RouterAddress
from alignedserve.types import InstanceId

ROLES: dict[str, type[InstanceProcess]] = {"prefill": PrefillProcess, "decode": DecodeProcess}


def main(role: str, instance_id: str, port: str, token: str, model: str) -> None:
    config = InstanceConfig(
        instance_id=InstanceId(instance_id),
        router=RouterAddress("127.0.0.1", int(port), token),
        engine=EngineConfig(
            model=model,
            dtype="float32",
            kv_cache_memory_bytes=4 << 20,
            max_num_batched_tokens=40,
            max_num_seqs=16,
            use_tqdm=False,
        ),
    )
    ROLES[role](config).run()


if __name__ == "__main__":
    main(*sys.argv[1:])

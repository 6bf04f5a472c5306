"""A process that delivers webhooks, and can be killed: python -m tests.gateway.webhooks.delivering STORE_URL"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter

from alignedserve.gateway.webhooks.config import WebhookConfig
from alignedserve.gateway.webhooks.deliverer import Deliverer
from alignedserve.store.redis_store import RedisStore
from tests.gateway.webhooks.receiver import SECRET

QUICK = WebhookConfig(allow_private=True, try_s=30.0, retry_s=0.05, max_retry_s=0.2, look_s=0.02)


async def main(store_url: str) -> None:
    config = WebhookConfig(("http://127.0.0.1/",))
    secrets = config.secrets({"ALIGNEDSERVE_WEBHOOK_SECRET": SECRET})
    store = RedisStore(store_url)
    await Deliverer(store.deliveries, QUICK, secrets, Counter(), "killed").run()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))

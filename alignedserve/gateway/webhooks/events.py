"""The events of webhooks, as in OpenAI's API, and their receivers."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence

import msgspec

from alignedserve.store import Delivery, DeliveryId, JobRecord, ResponseHead


class Events:
    def __init__(self, urls: Sequence[str] = ()) -> None:
        """`urls` receive all events."""
        self._urls = urls

    def of_job(self, job: JobRecord) -> list[Delivery]:
        """Returns the deliveries for a job that has ended."""
        urls = list(self._urls)
        if job.webhook_url is not None and job.webhook_url not in urls:
            urls.append(job.webhook_url)
        return _deliveries(f"batch.{job.status}", job.id, urls)

    def of_response(self, head: ResponseHead) -> list[Delivery]:
        """Returns the deliveries for a background response. There are none before it has ended."""
        return _deliveries(f"response.{head.status}", head.id, self._urls) if head.is_over else []


def _deliveries(kind: str, about: str, urls: Sequence[str]) -> list[Delivery]:
    event_id, now = f"evt_{secrets.token_hex(16)}", int(time.time())
    event = {"id": event_id, "object": "event", "created_at": now, "type": kind, "data": {"id": about}}
    body = msgspec.json.encode(event)
    return [
        Delivery(id=DeliveryId(f"{event_id}-{number}"), event_id=event_id, url=url, body=body, created_at=now)
        for number, url in enumerate(urls)
    ]

"""The chunks of a job's input file, which was uploaded or is read in place."""

from __future__ import annotations

from collections.abc import AsyncIterator

from alignedserve.batch.placed_inputs import PlacedInputs
from alignedserve.store import Contents, JobRecord, PlacedInput, Store
from alignedserve.store.contents import CHUNK_BYTES
from alignedserve.store.retry import retried


class FileGone(Exception):
    """The file existed earlier and is gone."""


class Inputs:
    def __init__(self, store: Store, contents: Contents, placed: PlacedInputs) -> None:
        self._store = store
        self._contents = contents
        self._placed = placed

    def chunks(self, job: JobRecord) -> AsyncIterator[bytes]:
        """Yields the chunks of the job's input file. Raises FileGone, and InputChanged for a file in place."""
        return self._placed_chunks(job.placed_input) if job.placed_input else self._uploaded_chunks(job)

    async def _uploaded_chunks(self, job: JobRecord) -> AsyncIterator[bytes]:
        file = await retried(self._store.file, job.input_file_id)
        if file is None:
            raise FileGone(job.input_file_id)
        for number in range(file.num_chunks):
            chunk = await retried(self._contents.chunk, file, number)
            if chunk is None:
                raise FileGone(job.input_file_id)
            yield chunk

    async def _placed_chunks(self, placed: PlacedInput) -> AsyncIterator[bytes]:
        for start in range(0, placed.num_bytes, CHUNK_BYTES):
            num_bytes = min(CHUNK_BYTES, placed.num_bytes - start)
            yield await retried(self._placed.read, placed, start, num_bytes)

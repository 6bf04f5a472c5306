from __future__ import annotations

from alignedserve.engine.sampler import noise_keys
from alignedserve.sampling_params import mix64

SEEDS = [0, 1, 12345, 2**63 - 1, -1, -(2**63), 2**64 - 1]
COUNTS = [0, 1, 7, 2**20, 3, 0, 5]


def test_keys_of_many_are_those_of_each_in_plain_arithmetic() -> None:
    plain = [
        mix64(mix64(seed) + (count + 1) * 0x9E3779B97F4A7C15)
        for seed, count in zip(SEEDS, COUNTS, strict=True)
    ]
    assert [key % 2**64 for key in noise_keys(SEEDS, COUNTS).tolist()] == plain
    assert len(set(plain)) == len(plain)

"""What XLA's pool of pinned host memory takes, against a model of it in the test."""

import math

import numpy as np
import pytest

from paged_optax.backend.pinned_pool import limit_gigabytes, pinned_bytes

MIB, GIB = 2**20, 2**30
#: GiB that are needed.
NEEDED = [0.3, 4.6, 12, 42.9, 90]


class Allocator:
    """XLA's `BFCAllocator`, of regions with chunks by address; nothing is freed."""

    def __init__(self, limit):
        self.limit, self.next_region = limit, min(limit, 2 * MIB)
        self.regions = []  # of lists of [bytes, whether in use]

    @property
    def taken(self):
        return sum(size for region in self.regions for size, _ in region)

    def extend(self, rounded):
        available = (self.limit - self.taken) // 256 * 256
        if rounded > available:
            return False
        grew = False
        while rounded > self.next_region:
            self.next_region, grew = self.next_region * 2, True
        self.regions.append([[min(self.next_region, available), False]])
        if not grew:
            self.next_region *= 2
        return True

    def find(self, rounded):
        fitting = [
            (size, n, place)
            for n, region in enumerate(self.regions)
            for place, (size, used) in enumerate(region)
            if not used and size >= rounded
        ]
        if not fitting:
            return False
        size, n, place = min(fitting)
        chunk = self.regions[n][place]
        if size >= 2 * rounded or size - rounded >= 128 * MIB:
            self.regions[n].insert(place + 1, [size - rounded, False])
            chunk[0] = rounded
        chunk[1] = True
        return True

    def allocate(self, size):
        rounded = (size + 255) // 256 * 256
        return self.find(rounded) or (self.extend(rounded) and self.find(rounded))


def simulated(arrays, limit):
    """Bytes that are taken; None where an array finds no room."""
    allocator = Allocator(limit)
    return allocator.taken if all(map(allocator.allocate, arrays)) else None


def arrays_of(needed, largest):
    """Arrays of unequal sizes: a large one, then ever smaller ones, again and again."""
    left, size, found = int(needed * GIB), largest, []
    while left > 0:
        found += [min(left, size)]
        left, size = left - found[-1], max(80 * MIB, size * 5 // 7) + 12345
        size = largest if size < 81 * MIB else size
    return found


@pytest.mark.parametrize("largest", [200 * MIB, 700 * MIB])
@pytest.mark.parametrize("needed", NEEDED)
def test_against_a_simulation(needed, largest):
    arrays = arrays_of(needed, largest)
    wanted = limit_gigabytes(arrays)
    for gigabytes in (64, 1000, wanted, wanted - 1, math.floor(needed)):
        limit = gigabytes * GIB
        assert pinned_bytes(arrays, limit) == simulated(arrays, limit)


@pytest.mark.parametrize("seed", range(20))
def test_against_a_simulation_of_arrays_of_any_size(seed):
    random = np.random.default_rng(seed)
    arrays = [int(2**x) for x in random.uniform(8, 30, 150)]
    for limit in (2**45, int(1.1 * sum(arrays)), int(0.9 * sum(arrays))):
        assert pinned_bytes(arrays, limit) == simulated(arrays, limit)


def test_chunks_are_multiples_of_256_bytes():
    """5000 of 257 bytes have 2.4 MiB, more than the first region; 3 x 512 fill 1536."""
    assert pinned_bytes([257] * 5000, GIB) == 6 * MIB
    assert pinned_bytes([257] * 3, 1535) is None
    assert pinned_bytes([257] * 3, 1536) == 1536


@pytest.mark.parametrize("needed", [4.6, 12, 42.9, 90])
def test_the_limit_keeps_the_pool_near_what_is_needed(needed):
    arrays = arrays_of(needed, 300 * MIB)
    limit = limit_gigabytes(arrays) * GIB
    assert needed * 33 / 32 * GIB <= limit
    assert needed * GIB <= pinned_bytes(arrays, limit) <= 1.15 * needed * GIB


def test_the_limit_grows_until_all_arrays_find_room():
    """Two regions of 4 GiB hold one of these arrays each, and a last one two."""
    assert limit_gigabytes([64 * MIB] * 80) == 6  # 5 would leave nothing for transfers
    arrays = [3 * GIB] * 4
    assert limit_gigabytes(arrays) == 14
    assert simulated(arrays, 14 * GIB) and not simulated(arrays, 13 * GIB)


def test_the_variable_is_the_limit(monkeypatch):
    monkeypatch.delenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", raising=False)
    arrays = [64 * MIB] * 16 * 65
    assert pinned_bytes(arrays) is None
    monkeypatch.setenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "66")
    assert pinned_bytes(arrays) == 66 * GIB
    assert pinned_bytes([0]) == 0

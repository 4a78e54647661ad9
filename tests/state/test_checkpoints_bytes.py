"""Saving and restoring: one leaf on the device at a time, and the host's memory."""

import collections
import json
import threading

import jax
import jax.numpy as jnp
import pytest

import paged_optax as po
from helpers import checkpoints
from helpers.apart import alone
from helpers.checkpoints import flax_bytes, manager, paged_adamw, pytree, standard
from helpers.programs import llama
from helpers.reference import arrays
from helpers.small import DEVICE, HOST
from paged_optax.backend.memory import nbytes


class Watch:
    """The most bytes on the devices, at each `device_put` and in between."""

    def __init__(self, monkeypatch):
        self.most, self.puts = 0, collections.Counter()
        self._before, self._done = self._bytes(), threading.Event()
        self._thread = threading.Thread(target=self._sample)
        put = jax.device_put

        def device_put(x, *args, **kwargs):
            self._note()
            made = put(x, *args, **kwargs)
            for array in jax.tree.leaves(made):
                if isinstance(array, jax.Array) and not isinstance(x, jax.core.Tracer):
                    self.puts[array.sharding.memory_kind] += nbytes(array)
            self._note()
            return made

        monkeypatch.setattr(jax, "device_put", device_put)

    @staticmethod
    def _bytes():
        return sum(
            nbytes(x)
            for x in jax.live_arrays()
            if not x.is_deleted() and x.sharding.memory_kind == DEVICE
        )

    def _note(self):
        self.most = max(self.most, self._bytes() - self._before)

    def _sample(self):
        while not self._done.wait(1e-3):
            self._note()

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._done.set()
        self._thread.join()
        self._note()


@pytest.mark.quick("flax_bytes")
@pytest.mark.parametrize("way", [standard, flax_bytes, manager, pytree])
def test_saving_and_restoring_hold_one_leaf_on_the_device(tmp_path, monkeypatch, way):
    """Of Llama-3-8B at 1/64 of each size; by design its vectors are on the device."""
    shapes = llama(hidden=64, inner=224, grouped=16, vocabulary=2004)
    assert len(jax.tree.leaves(shapes)) == 291
    tx = po.paged_adamw(1e-3, page_size="64KiB", min_paged_size="2KiB")
    params = jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), shapes)
    state = tx.init(params)
    leaf = max(map(nbytes, jax.tree.leaves(shapes)))
    assert po.host_bytes(state) > 30 * leaf
    target = po.abstract_state(tx, shapes)
    resident = po.device_bytes(state)
    with Watch(monkeypatch) as watch:
        restored = way(tmp_path, state, target)
    checkpoints.assert_same(restored, state)
    assert watch.most <= leaf
    # Nothing but what belongs there was ever put on the device.
    assert watch.puts[DEVICE] <= resident
    assert watch.puts[HOST] == po.host_bytes(state)


def test_the_watch_sees_a_detour(tmp_path, monkeypatch):
    """The check above can fail: a restore without placements goes to the device."""
    tx, params = paged_adamw(), arrays(shapes={"a": (256, 64), "b": (256, 64)})
    state = tx.init(params)
    with Watch(monkeypatch) as watch:
        standard(tmp_path, state, jax.eval_shape(tx.init, params))
    assert watch.most >= po.host_bytes(state)


#: By writer: saves, a step beside each, and the most over the state, in states.
MOST = {
    "orbax": (20, False, 0.05),
    "orbax, async": (20, False, 0.05),
    # A step copies what is being written: XLA:CPU does not reuse what NumPy reads.
    "orbax, async, a step beside": (20, True, 1.1),
    "orbax, compressed": (2, False, 1.6),
    "pickle": (2, False, 1.1),
    "pickle, device_get": (2, False, 0.1),
    "flax": (2, False, 3.1),
}


@pytest.mark.slow
@pytest.mark.pure
@pytest.mark.parametrize("name", MOST)
def test_peak_of_host_memory(name):
    """A state of a gigabyte; what Orbax restores has its bits."""
    saves, beside, most = MOST[name]
    call = f"{name!r}, 1 << 30, {saves}, {beside}"
    code = "import json; from helpers.save_memory import measure"
    over, equal = json.loads(alone(f"{code}; print(json.dumps(measure({call})))"))
    assert over < most
    assert equal

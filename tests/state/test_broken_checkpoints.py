"""Checkpoints on a full disk, truncated, and altered: the last good one restores."""

import functools
import pathlib
import random
import re

import jax
import orbax.checkpoint as ocp
import pytest

from helpers.apart import alone
from helpers.checkpoints import assert_same, bits, paged_adamw, target_of
from helpers.reference import arrays

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "save_and_restore.md"
#: Where a bit is changed, files in which arrays are.
FLIPS = 6
TX, SHAPES = paged_adamw(), {"w": (70, 32), "v": (40,)}

# What Orbax starts beside a read that fails is never awaited.
pytestmark = [
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.usefixtures("collected"),
]


@functools.cache
def trees():
    """What steps 1 and 2 made."""
    params = arrays(shapes=SHAPES)
    state, made = TX.init(params), []
    for _ in range(2):
        params, state = jax.tree.map(jax.numpy.copy, params), state
        updates, state = jax.jit(TX.update)(params, state, params)
        params = jax.tree.map(jax.numpy.add, params, updates)
        made.append((params, state))
    return made


@pytest.fixture
def folder(tmp_path):
    with ocp.CheckpointManager(tmp_path) as manager:
        for step, tree in enumerate(trees(), 1):
            manager.save(step, args=ocp.args.StandardSave(tree))
            manager.wait_until_finished()
    return tmp_path


def restore(folder, step):
    target = target_of(TX, arrays(shapes=SHAPES))
    with ocp.CheckpointManager(folder) as manager:
        return manager.restore(step, args=ocp.args.StandardRestore(target))


def files(folder):
    return sorted(x for x in folder.rglob("*") if x.is_file())


DAMAGE = {
    "half": lambda path, data: path.write_bytes(data[: len(data) // 2]),
    "empty": lambda path, data: path.write_bytes(b""),
    "gone": lambda path, data: path.unlink(),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_truncated(folder, damage):
    """Each file in turn: an error, or nothing that is missed. Never other numbers."""
    refused = []
    for path in files(folder / "2"):
        data = path.read_bytes()
        DAMAGE[damage](path, data)
        try:
            assert bits(restore(folder, 2)) == bits(trees()[1]), path
        except AssertionError:
            raise
        except Exception:
            refused.append(path)
            assert_same(restore(folder, 1), trees()[0])
        path.write_bytes(data)
    # Among them the one that holds the arrays.
    assert max(files(folder / "2"), key=lambda x: x.stat().st_size) in refused
    assert_same(restore(folder, 2), trees()[1])


@functools.cache
def documented():
    """The functions of the page's last block."""
    block = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)[-1]
    scope = {}
    exec(block[: block.index("tx, params =")], scope)
    return scope


@pytest.mark.slow
def test_altered(folder):
    """What Orbax does not notice of a changed bit, the documented digests do."""
    scope = documented()
    with ocp.CheckpointManager(folder) as manager:
        scope["seal"](manager, folder, 1)
        scope["seal"](manager, folder, 2)
        assert scope["last_whole"](manager, folder) == 2
    chance, unnoticed = random.Random(0), 0
    for path in files(folder / "2"):
        data = path.read_bytes()
        for _ in range(FLIPS if path.parent.name == "d" else 1):
            place = chance.randrange(len(data))
            changed = bytearray(data)
            changed[place] ^= 1 << chance.randrange(8)
            path.write_bytes(changed)
            try:
                unnoticed += bits(restore(folder, 2)) != bits(trees()[1])
            except Exception:
                pass
            with ocp.CheckpointManager(folder) as manager:
                assert scope["last_whole"](manager, folder) == 1
            path.write_bytes(data)
    # Else the page need not speak of digests.
    assert unnoticed
    assert_same(restore(folder, 1), trees()[0])
    with ocp.CheckpointManager(folder) as manager:
        assert scope["last_whole"](manager, folder) == 2


FULL = """
import pathlib, resource, sys
import orbax.checkpoint as ocp
from helpers.checkpoints import assert_same, bits, paged_adamw, target_of, train, SHAPES
from helpers.reference import arrays

folder, tx, params = pathlib.Path(FOLDER), paged_adamw(), arrays(shapes=SHAPES)
first = train(tx, params, tx.init(params), range(2))
second = train(tx, *first, range(2, 4))
wanted = bits(second)
target = target_of(tx, params)
save = lambda step, tree: manager.save(step, args=ocp.args.StandardSave(tree))
with ocp.CheckpointManager(folder) as manager:
    save(1, first)
    manager.wait_until_finished()
    # As a full disk does, this fails in the middle of a file.
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, resource.RLIM_INFINITY))
    try:
        save(2, second)
        manager.wait_until_finished()
        raise SystemExit("nothing failed")
    except Exception as error:
        print(type(error).__name__, error)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    assert manager.latest_step() == 1
    assert_same(manager.restore(1, args=ocp.args.StandardRestore(target)), first)
    assert bits(second) == wanted
    save(2, second)
    manager.wait_until_finished()
    assert_same(manager.restore(2, args=ocp.args.StandardRestore(target)), second)
with ocp.CheckpointManager(folder) as manager:
    assert manager.latest_step() == 2
print("saved where there is room")
"""


@pytest.mark.slow
def test_a_full_disk(tmp_path):
    """The error says so; the checkpoint before it, and the state, are as they were."""
    printed = alone(FULL.replace("FOLDER", repr(str(tmp_path))))
    assert "File too large" in printed and "saved where there is room" in printed

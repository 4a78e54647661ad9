"""Runs the suite on eight CPU devices, with both accelerator compilers at hand."""

import ctypes
import gc
import importlib.metadata
import importlib.util
import itertools
import os
import pathlib
import resource
import sys
import tempfile
import zlib

import pytest

# What the tests share asserts too, and says as much when it fails.
pytest.register_assert_rewrite("helpers")

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Each test process loads libtpu to compile, never to run.
os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
os.environ["TPU_SKIP_MDS_QUERY"] = "1"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "")
    + " --xla_gpu_autotune_level=0 --xla_force_host_platform_device_count=8"
)
# Where runs of tests keep what they compile. Programs that they start keep nothing.
_COMPILED = os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)


#: These import what is optional; without it they are not looked through for doctests.
_OPTIONAL = {"helpers/hf_real.py": ["eqx_zoo"], "helpers/hf_pair.py": ["torch"]}
collect_ignore = [
    path
    for path, modules in _OPTIONAL.items()
    if not all(map(importlib.util.find_spec, ["transformers", *modules]))
]

#: Rooms of which neither JAX nor XLA decides more than what compiles.
_PURE = ("cli", "planning", "project")


def pytest_addoption(parser):
    """Adds what continuous integration asks for."""
    parser.addoption(
        "--share",
        metavar="DAY/DAYS",
        help="the slow tests of a day: in so many days in a row all of them run",
    )
    parser.addoption(
        "--files",
        metavar="DAY/DAYS",
        help="the same of whole files, but for what compiles for an accelerator",
    )
    parser.addoption(
        "--optimized",
        action="store_true",
        help="compile every test's programs as XLA:CPU does by default",
    )


def pytest_report_header():
    """The versions that decide what is tested."""
    found = {x.name: x.version for x in importlib.metadata.distributions()}
    named = ("jax", "jaxlib", "libtpu", "optax", "flax", "orbax-checkpoint", "numpy")
    return ", ".join(f"{x} {found[x]}" for x in named if x in found)


def pytest_configure(config):
    """Workers share what they compile, in this run alone or with other runs."""
    folder = getattr(config, "workerinput", {}).get("compiled") or _COMPILED
    if folder is None:
        config.own_folder = tempfile.TemporaryDirectory(prefix="paged_optax_tests_")
        folder = config.own_folder.name
    config.compiled = folder
    import jax

    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.05)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    """xdist hands the folder to its workers."""
    node.workerinput["compiled"] = node.config.compiled


def pytest_unconfigure(config):
    """And nothing stays behind."""
    if hasattr(config, "own_folder"):
        config.own_folder.cleanup()


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses by markers
def pytest_collection_modifyitems(config, items):
    """Marks what is slow and what is pure, and sorts.

    What takes long comes first, else one worker is left with it in the end. What is
    compiled in one way is not mixed with the rest, for which JAX forgets all it has.
    """
    _mark_slow(items)
    for item in items:
        if item.path.parent.name in _PURE and not _has(item, "compiler"):
            item.add_marker("pure")
    slow = {x for x in items if _has(x, "slow")}
    others = _of_other_days(config.getoption("share"), slow, lambda x: f"::{x.name}")
    here = {x for x in items if not _has(x, "compiler")} - slow
    others |= _of_other_days(config.getoption("files"), here, lambda x: "")
    items[:] = [item for item in items if item not in others]
    config.hook.pytest_deselected(items=[*others])
    items.sort(key=lambda item: (not _has(item, "slow"), not _has(item, "optimized")))


def pytest_collection_finish(session):
    """What has been imported stays, and is not looked through again for garbage."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def _of_other_days(share, items, name):
    """Items that run on other days, by their names: another test moves none."""
    if share is None:
        return set()
    day, days = map(int, share.split("/"))
    turn = lambda item: zlib.crc32(f"{item.path.name}{name(item)}".encode())
    return {item for item in items if (turn(item) - day) % days}


def _mark_slow(items):
    """Marks as slow the cases that their test's `quick` does not name."""
    chosen = [(x, x.get_closest_marker("quick")) for x in items]
    chosen = [(x, quick.args) for x, quick in chosen if quick]
    found = set()
    for item, parts in chosen:
        if any(part in f"-{item.callspec.id}-" for part in parts):
            found.add(item.function)
        else:
            item.add_marker("slow")
    whole_files = not any("::" in argument for argument in sys.argv)
    if whole_files and (typos := {x.function for x, _ in chosen} - found):
        names = ", ".join(sorted(function.__qualname__ for function in typos))
        raise pytest.UsageError(f"quick(...) names no case of {names}")


@pytest.fixture(autouse=True, scope="module")
def flax_as_before():
    """Undoes what Tunix's models change of Flax, for all, when they are imported."""
    import flax

    name = "flax_always_shard_variable"
    before = getattr(flax.config, name, None)
    yield
    if before is not None:
        flax.config.update(name, before)


@pytest.hookimpl(tryfirst=True)  # before a fixture of the file compiles
def pytest_runtest_setup(item):
    """Leaves most of XLA:CPU's optimizations out, unless a test is `optimized`."""
    from helpers.quick_compiler import compile_quickly

    by_default = item.config.getoption("optimized") or _has(item, "optimized")
    compile_quickly(not by_default)


# XLA:CPU maps each function of a program apart, and Linux ends a process of more maps.
_MOST_MAPPED, _EVERY = 65_530, 8
# Bytes that programs may add to a process before JAX drops them.
_MOST_ADDED = 1 << 30
_PROCESS = pathlib.Path("/proc/self")
_tests, _floor = itertools.count(), 0


def pytest_runtest_teardown(item):
    """Drops JAX's programs in time, those of eager loops and branches too."""
    global _floor
    if not _PROCESS.exists():
        return
    _floor = _floor or _resident()
    many = lambda: (_PROCESS / "maps").read_bytes().count(b"\n") > _MOST_MAPPED // 2
    if _resident() > _floor + _MOST_ADDED or (not next(_tests) % _EVERY and many()):
        import jax

        jax.clear_caches()
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        _floor = _resident()


def _resident():
    pages = (_PROCESS / "statm").read_text().split()[1]
    return int(pages) * resource.getpagesize()


def _has(item, marker):
    return item.get_closest_marker(marker) is not None


@pytest.fixture
def strict_ranks():
    """No array is broadcast to another's rank but explicitly."""
    import jax

    with jax.numpy_rank_promotion("raise"):
        yield


@pytest.fixture
def strict(strict_ranks):
    """Nor does its dtype become another's."""
    import jax

    with jax.numpy_dtype_promotion("strict"):
        yield


@pytest.fixture
def one_device(monkeypatch):
    """What is traced is for a machine of one device, though this process has eight."""
    import jax

    monkeypatch.setattr(jax, "device_count", lambda: 1)


@pytest.fixture(params=["cpu", "tpu"])
def platform(request, monkeypatch):
    """What a TPU would compute, computed here too; nothing jitted is kept from one."""
    import jax

    def chosen(*arguments, default=None, **branches):
        return branches.get(request.param, default)(*arguments)

    monkeypatch.setattr(jax.lax, "platform_dependent", chosen)
    jax.clear_caches()
    yield request.param
    jax.clear_caches()


@pytest.fixture
def collected():
    """Garbage is collected after the test, and in none that comes after it."""
    yield
    gc.collect()


@pytest.fixture(scope="session")
def compilations():
    """The events of compilations, so far."""
    import jax

    events = []
    compiled = "/jax/core/compile/backend_compile_duration"
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, *_, **__: events.append(name) if name == compiled else None
    )
    return events


@pytest.fixture(scope="module")
def example():
    """The package `examples/finetune_hf`."""
    from helpers import hf_folders

    return hf_folders.modules()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Makes a tiny Hugging Face folder of a family, once."""
    from helpers import hf_folders

    return hf_folders.Made(tmp_path_factory.mktemp("folders"))

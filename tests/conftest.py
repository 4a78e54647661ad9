"""Runs the suite on eight CPU devices, with both accelerator compilers at hand."""

import os

import pytest

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Each test process loads libtpu to compile, never to run.
os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
os.environ["TPU_SKIP_MDS_QUERY"] = "1"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "")
    + " --xla_gpu_autotune_level=0 --xla_force_host_platform_device_count=8"
)


def pytest_collection_modifyitems(items):
    """What takes long comes first, so that no worker is left with it in the end."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.fixture
def quick_to_compile(request):
    """Leaves most of XLA:CPU's optimizations out, for tests of many small programs."""
    import jax

    quick = request.node.get_closest_marker("compiler") is None
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", quick)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


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

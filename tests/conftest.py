"""Runs the suite on eight CPU devices, with both accelerator compilers at hand."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Each test process loads libtpu to compile, never to run.
os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
os.environ["TPU_SKIP_MDS_QUERY"] = "1"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "")
    + " --xla_gpu_autotune_level=0 --xla_force_host_platform_device_count=8"
)

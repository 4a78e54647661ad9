"""XLA:CPU in a third of its time: machine code that is not optimized.

It leans on a private JAX entry point, which chooses the options of each compilation
(checked with jax 0.10.2 and 0.12.0.1): an accelerator's compiler, in the same process,
ends it where `XLA_FLAGS` has an option of XLA:CPU alone.
"""

import jax
from jax._src import compiler

#: Nothing that makes a program faster, and one module a program.
OPTIONS = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_parallel_codegen_split_count": 1,
}
if jax.__version_info__ < (0, 11):  # by the older emitters; newer XLA has no others
    OPTIONS["xla_cpu_use_fusion_emitters"] = False

#: The same, as `XLA_FLAGS` has them.
FLAGS = " ".join(f"--{name}={value}".lower() for name, value in OPTIONS.items())

_options_of = compiler.get_compile_options


def _with_options(*arguments, backend=None, env_options_overrides=None, **named):
    overrides = env_options_overrides or {}
    if backend is not None and backend.platform == "cpu":
        overrides = OPTIONS | overrides
    return _options_of(
        *arguments, backend=backend, env_options_overrides=overrides, **named
    )


def compile_quickly(quickly: bool) -> None:
    """Chooses how XLA:CPU compiles all that follows.

    JAX would not compile again what it has compiled otherwise, so it forgets that.

    Args:
      quickly: Whether in a third of the time; else as XLA does by default.
    """
    chosen = _with_options if quickly else _options_of
    if compiler.get_compile_options is not chosen:
        jax.clear_caches()
    compiler.get_compile_options = chosen

"""XLA:CPU in a third of its time: machine code that is not optimized.

It leans on a private JAX entry point, which chooses the options of each compilation
(checked with jax 0.10.2 and 0.12.0.1): an accelerator's compiler, in the same process,
ends it where `XLA_FLAGS` has an option of XLA:CPU alone.
"""

import jax
from jax._src import compiler

#: One module a program, by the older emitters, whose code LLVM has less to do with.
OPTIONS = {"xla_cpu_parallel_codegen_split_count": 1}
if jax.__version_info__ < (0, 11):  # newer XLA has no others
    OPTIONS["xla_cpu_use_fusion_emitters"] = False

_options_of = compiler.get_compile_options
_met = False  # a program that was compiled quickly, since JAX has last forgotten all


def _with_options(*arguments, backend=None, env_options_overrides=None, **named):
    global _met
    overrides = env_options_overrides or {}
    if backend is not None and backend.platform == "cpu":
        _met = True
        overrides = OPTIONS | overrides
    return _options_of(
        *arguments, backend=backend, env_options_overrides=overrides, **named
    )


def compile_quickly(quickly: bool) -> None:
    """Chooses how all that follows is compiled.

    Args:
      quickly: Whether in a third of the time; else as XLA does by default.
    """
    jax.config.update("jax_disable_most_optimizations", quickly)
    compiler.get_compile_options = _with_options if quickly else _options_of


def forget_quickly_compiled() -> None:
    """Has JAX compile again what has been compiled quickly: by itself it would not."""
    global _met
    if _met:
        jax.clear_caches()
    _met = False

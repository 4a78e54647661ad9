"""Warnings that point at a line of the user, not of a library."""

import inspect
import warnings
from types import FrameType

# Libraries that call a user's transformation.
_LIBRARIES = {"paged_optax", "jax", "jaxlib", "optax", "flax"}


def warn_user(message: str) -> None:
    """Warns at the innermost line outside libraries, once for each line."""
    frame = inspect.currentframe()
    assert frame is not None  # CPython has frames
    while _module(frame).partition(".")[0] in _LIBRARIES and frame.f_back:
        frame = frame.f_back
    warnings.warn_explicit(
        message,
        UserWarning,
        frame.f_code.co_filename,
        frame.f_lineno,
        _module(frame),
        frame.f_globals.setdefault("__warningregistry__", {}),
    )


def called_by(module: str) -> bool:
    """True if a function of `module` is on the call stack."""
    frame = inspect.currentframe()
    while frame and _module(frame) != module:
        frame = frame.f_back
    return frame is not None


def _module(frame: FrameType) -> str:
    return frame.f_globals.get("__name__", "")

"""Fixtures of tests that count compilations."""

import jax
import pytest

COMPILED = "/jax/core/compile/backend_compile_duration"


@pytest.fixture(scope="session")
def compilations():
    """The events of compilations, so far."""
    events = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, *_, **__: events.append(name) if name == COMPILED else None
    )
    return events

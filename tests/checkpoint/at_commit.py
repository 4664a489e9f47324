"""A place in the background of every save: its files are written, and its directory has no name yet.

A test sets `hook`, by `monkeypatch.setattr(at_commit, "hook", ...)` or in a program that it starts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import orbax.checkpoint as ocp

hook: Callable[[], None] = lambda: None  # noqa: E731
ocp.options.AsyncOptions = functools.partial(  # type: ignore[misc]
    ocp.options.AsyncOptions, post_finalization_callback=lambda: hook()
)

"""Labels of work in JAX's name stack, which every transformation of JAX preserves.

A named computation is a `jax.jit` under a scope with its name; its transpose is a `jit` under that scope inside
`transpose(...)`. So JAX applies all its rules of `jax.jit` (differentiation, batching, rematerialisation, dead code). A
label can only misplace work, never change a number.
"""

from __future__ import annotations

import re
from contextlib import AbstractContextManager
from typing import Any
from urllib.parse import quote, unquote

import jax

__all__ = ["call_scope", "calls_in", "computation_scope", "computations_in", "transposes_in"]

_COMPUTATION = re.compile(r"mpmd\.named\[([^\]]*)\]")
_CALL = re.compile(r"mpmd\.call\[(\d+)\]")


def computation_scope(name: str, transpose_count: int = 0) -> AbstractContextManager[Any]:
    """Return the scope of a named computation; `transpose_count` marks a backward pass that is written by hand."""
    # Brackets, slashes and parentheses have a meaning in name stacks.
    return jax.named_scope(f"mpmd.named[{quote(name, safe=' ')};{transpose_count}]")


def call_scope(call_counter: int) -> AbstractContextManager[Any]:
    """Return the scope of a call for one microbatch."""
    return jax.named_scope(f"mpmd.call[{call_counter}]")


def computations_in(stack: str) -> list[tuple[str, int]]:
    """Return the named computations around an equation, outermost first, with the transpose counts in their scopes."""
    labels = [label.rpartition(";") for label in _COMPUTATION.findall(stack)]
    return [(unquote(name), int(count)) for name, _, count in labels]


def calls_in(stack: str) -> list[int]:
    """Return the call counters around an equation, outermost first."""
    return [int(counter) for counter in _CALL.findall(stack)]


def transposes_in(stack: str) -> int:
    """Count the transpositions of an equation."""
    return stack.count("transpose(")

"""How work is labelled: by JAX's name stack, which every transformation of JAX carries along.

A named computation is a `jax.jit` under a scope that says its name; its transpose, wherever it ends up, is a `jit`
under that scope inside `transpose(...)`. So all of JAX's rules (differentiation, batching, rematerialisation, dead
code) are those of `jax.jit` itself, and a label can only misplace work, never change a number.
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
    """The scope of a named computation; `transpose_count` tells one that is written as a backward pass by hand."""
    # Brackets, slashes and parentheses have a meaning in name stacks.
    return jax.named_scope(f"mpmd.named[{quote(name, safe=' ')};{transpose_count}]")


def call_scope(call_counter: int) -> AbstractContextManager[Any]:
    """The scope of a call for one microbatch."""
    return jax.named_scope(f"mpmd.call[{call_counter}]")


def computations_in(stack: str) -> list[tuple[str, int]]:
    """The named computations around an equation, outermost first, with the transpose counts written into them."""
    labels = [label.rpartition(";") for label in _COMPUTATION.findall(stack)]
    return [(unquote(name), int(count)) for name, _, count in labels]


def calls_in(stack: str) -> list[int]:
    """The call counters around an equation, outermost first."""
    return [int(counter) for counter in _CALL.findall(stack)]


def transposes_in(stack: str) -> int:
    """How often the equation was transposed."""
    return stack.count("transpose(")

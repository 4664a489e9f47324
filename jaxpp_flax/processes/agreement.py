"""What all processes are to have alike is compared: programs by their lines, values by their hashes.

Every process traces, plans, makes the weights and reads the data by itself. A seed that depends on the process, or the
time, gives the copies of a shared weight different values; each of them trains, and nothing but the loss would ever
tell.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpp_flax.processes.group import CoordinationError, ProcessGroup
from jaxpp_flax.processes.watch import name_processes

__all__ = ["ValuesMismatchError", "agree_on", "hash_of", "text_of"]


class ValuesMismatchError(CoordinationError):
    """Processes of one run hold different values where all are to have the same; the message names the first."""


class ProgramMismatchError(CoordinationError):
    """Processes of one run have planned different programs; the message shows the first difference."""


def agree(group: ProcessGroup, name: str, lines: Sequence[str], timeout_s: float | None) -> str:
    """Compare the processes' lines.

    Args:
      group: the processes; each calls this at the same point of its program.
      name: which program, for errors.
      lines: what must be equal.
      timeout_s: to wait for the slowest; None: until a process fails.

    Returns:
      The hash of the lines: a name for the program that every process knows it by.

    Raises:
      ProgramMismatchError: naming the first line that differs, and in which processes.
      BarrierTimeoutError, ProcessFailedError: if a process does not come.
    """
    digest = hashlib.blake2b("\n".join(lines).encode(), digest_size=8)
    digests = group.exchange(f"the hash of {name}", digest.digest(), timeout_s)
    if len(set(digests)) > 1:
        every_line = b"".join(hashlib.blake2b(line.encode(), digest_size=8).digest() for line in lines)
        known = group.exchange(f"the lines of {name}", every_line, timeout_s)
        first = _first_difference(known)
        mine = lines[first] if first < len(lines) else "(its program ends before)"
        texts = [text.decode() for text in group.exchange(f"the difference in {name}", mine.encode(), timeout_s)]
        raise ProgramMismatchError(_explain(name, texts))
    return digest.hexdigest()


def _first_difference(programs: Sequence[bytes]) -> int:
    position = 0
    while len({program[8 * position : 8 * position + 8] for program in programs}) == 1:
        position += 1
    return position


def _explain(name: str, texts: Sequence[str]) -> str:
    versions: dict[str, list[int]] = {}
    for process, text in enumerate(texts):
        versions.setdefault(text, []).append(process)
    shown = "\n".join(f"  {name_processes(processes)}: {text}" for text, processes in versions.items())
    return (
        f"the processes of this run do not agree on {name}. The first difference:\n{shown}\n"
        "Every process must run the same script with the same model, batch shapes, schedule and versions; look for "
        "what depends on the process: its index, its data, its environment, an order of sets or files."
    )


def hash_of(value: Any, max_elements: int | None = None) -> str | None:
    """Sixteen digits that stand for a value's bits; None for one that this process has not, or only a part of.

    Args:
      value: an array of any dtype, PRNG keys included, or a number.
      max_elements: of a larger array take about so many elements, evenly spread. None: take all.

    >>> hash_of(np.arange(3)) == hash_of(jnp.arange(3)), hash_of(np.arange(3)) == hash_of(np.arange(1, 4))
    (False, False)
    >>> hash_of(np.float32([1, 2])) == hash_of(jnp.array([1.0, 2.0]))
    True
    >>> hash_of(jax.ShapeDtypeStruct((2,), jnp.float32)) is None
    True
    """
    if isinstance(value, jax.ShapeDtypeStruct):
        return None
    if isinstance(value, jax.Array):
        if not value.is_fully_addressable:
            return None
        if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            value = jax.random.key_data(value)
    array = np.asarray(value).reshape(-1)
    if max_elements is not None and array.size > max_elements:
        # Odd, so that it meets every column of rows whose length is a power of two.
        array = array[:: array.size // max_elements | 1]
    return hashlib.blake2b(np.ascontiguousarray(array).view(np.uint8).data, digest_size=8).hexdigest()


def text_of(value: Any) -> str | None:
    """What stands for a value in a message: a single number itself, of others `hash_of`; None where that is None.

    >>> text_of(jnp.float32(0.25)), text_of(np.array([7])), text_of(jnp.arange(3)) == hash_of(jnp.arange(3))
    ('0.25', '7', True)
    """
    whole = not isinstance(value, jax.Array) or value.is_fully_addressable
    number = whole and np.size(value) == 1 and not isinstance(value, jax.ShapeDtypeStruct)
    if not number or (isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key)):
        return hash_of(value)
    return str(np.asarray(value).reshape(())[()])  # by NumPy: as few digits as tell its dtype's numbers apart


def agree_on(
    group: ProcessGroup,
    name: str,
    hashes: Mapping[str, str | None],
    remedy: str,
    ended: str | None = None,
    among: str = "",
) -> None:
    """Make sure that what every process has of these values is the same.

    Args:
      group: the processes; each calls this at the same point of its program.
      name: what the values are together, for errors.
      hashes: by the values' names, or what else stands for them (`text_of`); None for one that this process has not.
      remedy: what to change.
      ended: why this process does nothing for the others any more until all have come here, if so.
      among: which of these values are compared this time, for errors.

    Raises:
      ValuesMismatchError: naming the values that differ, and in which processes.
      ProcessFailedError: if a process does not come.
    """
    title, text = f"the hashes of {name}", json.dumps(dict(hashes)).encode()
    everyones = group.exchange(title, text) if ended is None else group.meet_idle(title, text, ended)
    wrong = differing([json.loads(answer) for answer in everyones])
    if not wrong:
        return
    path, versions = next(iter(wrong.items()))
    shown = "\n".join(f"  {name_processes(processes)}: {text}" for text, processes in versions.items())
    more = "" if len(wrong) == 1 else f" It is one of {len(wrong)} that differ."
    raise ValuesMismatchError(
        f"the processes of this run have different values of {name}{among and f', {among}'}, where all are to have the "
        f"same: {path}.{more}\n"
        f"{shown}\n{remedy}"
    )


def differing(known: Sequence[Mapping[str, str | None]]) -> dict[str, dict[str, list[int]]]:
    """Of hashes by name, a mapping for each process: the names under which they differ, with hashes and processes.

    None, or no entry, stands for a value that a process has not.

    >>> differing([{"x": "a", "y": "b"}, {"x": "c", "y": None}, {"x": "a"}])
    {'x': {'a': [0, 2], 'c': [1]}}
    """
    found: dict[str, dict[str, list[int]]] = {}
    for process, hashes in enumerate(known):
        for path, text in hashes.items():
            if text is not None:
                found.setdefault(path, {}).setdefault(text, []).append(process)
    return {path: texts for path, texts in found.items() if len(texts) > 1}

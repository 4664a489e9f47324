"""The comparison of the processes of a run: lines of text, and values by their hashes, must be equal in all of them.

Every process traces, plans, makes the weights and reads the data by itself. If a seed depends on the process or on the
time, the copies of a shared weight differ. Each copy trains, and nothing but the loss would ever show it.

Small values that processes exchange by JSON, and work that one process does for all, stand here too.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpp_flax.error_codes import documented
from jaxpp_flax.processes.group import ProcessGroup
from jaxpp_flax.processes.store import CoordinationError
from jaxpp_flax.processes.waits import name_processes

__all__ = [
    "ProgramMismatchError",
    "ValuesMismatchError",
    "compare_hashes",
    "compare_lines",
    "describe_environment",
    "do_in_process_0",
    "exchange_values",
    "find_everywhere",
    "found_by_process_0",
    "value_hash",
    "value_text",
]

# Seconds. Long, since a process may have to read a large checkpoint's files; a failure ends the wait sooner.
_EXCHANGE_TIMEOUT = 3600.0

# Settings that XLA compiles by, or that are applied when a program is lowered: a jaxpr does not show them.
_SETTINGS = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
    "jax_use_shardy_partitioner",
    "jax_allow_f16_reductions",
    "jax_disable_jit",
    "jax_cpu_collectives_implementation",
)
_VARIABLES = ("LIBTPU_INIT_ARGS", "NVIDIA_TF32_OVERRIDE")
# Flags of XLA that may differ between processes: the number of devices, and the files of dumps.
_OWN_FLAGS = ("--xla_force_host_platform_device_count", "--xla_dump", "--xla_gpu_dump")


@documented("JPF503")
class ValuesMismatchError(CoordinationError):
    """Processes of one run hold different values that must be equal; the message names the first one that differs."""


@documented("JPF504")
class ProgramMismatchError(CoordinationError):
    """Processes of one run have planned different programs; the message shows the first difference."""


def compare_lines(group: ProcessGroup, name: str, lines: Sequence[str], timeout_s: float | None) -> str:
    """Make sure that lines of text are equal in all processes.

    Args:
      group, timeout_s: as in `exchange_values`.
      name: the lines in words, such as "program 1", for errors.
      lines: the lines of this process.

    Returns:
      The hash of the lines, the same in every process.

    Raises:
      ProgramMismatchError: naming the first line that differs, and in which processes.
    """
    digest = hashlib.blake2b("\n".join(lines).encode(), digest_size=8)
    digests = group.exchange(f"the hash of {name}", digest.digest(), timeout_s)
    if len(set(digests)) > 1:
        line_hashes = b"".join(hashlib.blake2b(line.encode(), digest_size=8).digest() for line in lines)
        known = group.exchange(f"the lines of {name}", line_hashes, timeout_s)
        first = _first_difference(known)
        mine = lines[first] if first < len(lines) else "(its program ends before)"
        texts = [text.decode() for text in group.exchange(f"the difference in {name}", mine.encode(), timeout_s)]
        raise ProgramMismatchError(_describe_difference(name, texts))
    return digest.hexdigest()


def _first_difference(programs: Sequence[bytes]) -> int:
    position = 0
    while len({program[8 * position : 8 * position + 8] for program in programs}) == 1:
        position += 1
    return position


def _describe_difference(name: str, texts: Sequence[str]) -> str:
    versions = _find_differences([{name: text} for text in texts])[name]
    return (
        f"the processes of this run do not agree on {name}. The first difference:\n{_list_versions(versions)}\n"
        "Every process must run the same script with the same model, batch shapes, schedule and versions; look for "
        "what depends on the process: its index, its data, its environment, an order of sets or files."
    )


def _list_versions(versions: Mapping[str, Sequence[int]]) -> str:
    return "\n".join(f"  {name_processes([*processes])}: {text}" for text, processes in versions.items())


def compare_hashes(
    group: ProcessGroup,
    name: str,
    hashes: Mapping[str, str | None],
    remedy: str,
    idle_reason: str | None = None,
    among: str = "",
    *,
    waits: bool = True,
) -> None:
    """Make sure that each value is equal in all processes that have it; all processes call this.

    Args:
      group, idle_reason: as in `exchange_values`.
      name: a name for all the values, such as "the initial state", for errors.
      hashes: the hash or text (`value_text`) of each value by its name; None for a value that this process lacks.
      remedy: the advice at the end of the error's message.
      among: the part of the values that this call compares, such as "steps 3 to 4", for errors.
      waits: False compares with the processes that have made this call already, and waits for none. Of two that
        differ, the one that comes later raises the error, which ends the run. Calls are counted by `name`.

    Raises:
      ValuesMismatchError: if values differ. The message names the first one, and the processes.
      ProcessFailedError: if a process fails meanwhile.
    """
    if waits:
        title = f"the hashes of {name}"
        everyones = exchange_values(group, title, dict(hashes), timeout_s=None, idle_reason=idle_reason)
    else:
        everyones = _given_already(group, name, dict(hashes))
    wrong = _find_differences(everyones)
    if not wrong:
        return
    path, versions = next(iter(wrong.items()))
    more = "" if len(wrong) == 1 else f" It is one of {len(wrong)} that differ."
    raise ValuesMismatchError(
        f"the processes of this run have different values of {name}{among and f', {among}'}, where all must have the "
        f"same: {path}.{more}\n"
        f"{_list_versions(versions)}\n{remedy}"
    )


def _given_already(group: ProcessGroup, name: str, texts: Mapping[str, str | None]) -> list[dict[str, str | None]]:
    """Return the texts of the processes that have made this call already, if some differ; else nothing."""
    if group.process_count == 1:
        return []
    words = json.dumps(texts).encode()
    digests = group.values.beside(name, hashlib.blake2b(words, digest_size=8).digest(), words)
    if len(set(digests.values())) == 1:
        return []
    told = group.values.words_beside(name)
    return [json.loads(told[process]) if process in digests else {} for process in range(group.process_count)]


def _find_differences(known: Sequence[Mapping[str, str | None]]) -> dict[str, dict[str, list[int]]]:
    """The names of values whose hashes differ, each with the hashes and the processes that have them.

    >>> _find_differences([{"x": "a", "y": "b"}, {"x": "c", "y": None}, {"x": "a"}])
    {'x': {'a': [0, 2], 'c': [1]}}
    """
    found: dict[str, dict[str, list[int]]] = {}
    for process, hashes in enumerate(known):
        for path, text in hashes.items():
            if text is not None:
                found.setdefault(path, {}).setdefault(text, []).append(process)
    return {path: texts for path, texts in found.items() if len(texts) > 1}


# -- texts for the comparison


def value_hash(value: Any, max_elements: int | None = None) -> str | None:
    """Return a hash of a value's bits, 16 digits; None if this process has only a part of the value, or its shape.

    If an array has more than `max_elements`, only about `max_elements` evenly spaced elements are hashed.

    >>> value_hash(np.arange(3)) == value_hash(jnp.arange(3)), value_hash(np.arange(3)) == value_hash(np.arange(1, 4))
    (False, False)
    >>> value_hash(np.float32([1, 2])) == value_hash(jnp.array([1.0, 2.0]))
    True
    >>> value_hash(jax.ShapeDtypeStruct((2,), jnp.float32)) is None
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
        # An odd step reaches every column of rows whose length is a power of two.
        array = array[:: array.size // max_elements | 1]
    return hashlib.blake2b(np.ascontiguousarray(array).view(np.uint8).data, digest_size=8).hexdigest()


def value_text(value: Any) -> str | None:
    """Return the text for a value in a message: the number if it is a single one, else the `value_hash`.

    >>> value_text(jnp.float32(0.25)), value_text(np.array([7])), value_text(jnp.arange(3)) == value_hash(jnp.arange(3))
    ('0.25', '7', True)
    """
    whole = not isinstance(value, jax.Array) or value.is_fully_addressable
    number = whole and np.size(value) == 1 and not isinstance(value, jax.ShapeDtypeStruct)
    if not number or (isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key)):
        return value_hash(value)
    return str(np.asarray(value).reshape(())[()])  # NumPy writes as many digits as tell its dtype's numbers apart


def describe_environment() -> list[str]:
    """Versions, settings and flags that change numbers and that no program shows, in lines for `compare_lines`.

    The settings are read at the moment of the call: scripts change them after the start.

    Example:
      >>> [line for line in describe_environment() if "enable_x64" in line]
      ['the setting jax_enable_x64 is False']
    """
    # A setting may come or go with JAX's version, which the first lines compare.
    lines = [f"the version of {name} is {version(name)}" for name in ("jax", "jaxlib")]
    lines += [f"the setting {name} is {getattr(jax.config, name)}" for name in _SETTINGS if hasattr(jax.config, name)]
    lines += [f"the environment variable {name} is {os.environ.get(name)!r}" for name in _VARIABLES]
    flags = sorted(flag for flag in os.environ.get("XLA_FLAGS", "").split() if not flag.startswith(_OWN_FLAGS))
    return [*lines, f"the environment variable XLA_FLAGS has {' '.join(flags) or 'nothing'}"]


# -- small values that processes exchange


def exchange_values(
    group: ProcessGroup,
    name: str,
    value: Any,
    *,
    timeout_s: float | None = _EXCHANGE_TIMEOUT,
    idle_reason: str | None = None,
) -> list[Any]:
    """Give every process the values of all processes, as JSON.

    Args:
      group: the processes; each of them calls this at the same point of its program.
      name: a name for the values, for errors.
      value: a value that JSON can write.
      timeout_s, idle_reason: as in `ProcessGroup.barrier`.

    Returns:
      The values in the order of the processes, as JSON reads them.

    Raises:
      BarrierTimeoutError: if a process does not call this in time.
      ProcessFailedError: if a process fails meanwhile.

    Example:
      >>> exchange_values(ProcessGroup(None, 0, 1), "the position", {"batches": 3})
      [{'batches': 3}]
    """
    answers = group.exchange(name, json.dumps(value).encode(), timeout_s, idle_reason=idle_reason)
    return [json.loads(answer) for answer in answers]


def do_in_process_0(group: ProcessGroup, name: str, function: Callable[[], Any], *errors: type[Exception]) -> None:
    """Call `function` in process 0 for its effect, while the others wait; see `found_by_process_0`.

    Example:
      >>> do_in_process_0(ProcessGroup(None, 0, 1), "the greeting", lambda: print("done"), OSError)
      done
    """

    def without_result() -> None:
        function()

    found_by_process_0(group, name, without_result, *errors)


def found_by_process_0(group: ProcessGroup, name: str, function: Callable[[], Any], *errors: type[Exception]) -> Any:
    """Return in every process what `function` returns in process 0, as JSON; an error there is raised in all of them.

    `name` and `errors` are as in `find_everywhere`.

    Example:
      >>> found_by_process_0(ProcessGroup(None, 0, 1), "the steps", lambda: [1, 2], OSError)
      [1, 2]
    """
    return find_everywhere(group, name, function if group.process_index == 0 else lambda: None, *errors)[0]


def find_everywhere(group: ProcessGroup, name: str, function: Callable[[], Any], *errors: type[Exception]) -> list[Any]:
    """Call `function` in every process and return the results of all, as JSON; an error in any is raised in all.

    A process whose own call worked raises the first of the types `errors` that fits the other's error, else the last
    type, with the same message. `name` is the work in words, for the errors of the processes that wait.

    Example:
      >>> find_everywhere(ProcessGroup(None, 0, 1), "the steps", lambda: [1, 2], OSError)
      [[1, 2]]
    """
    failure: Exception | None = None
    found: Any = None
    try:
        found = function()
    except Exception as caught:
        failure = caught
    kind = next((i for i, error in enumerate(errors) if isinstance(failure, error)), len(errors) - 1)
    answers = exchange_values(group, name, [found, None if failure is None else [kind, str(failure)]])
    if failure is not None:
        raise failure
    for process, (_, refusal) in enumerate(answers):
        if refusal is not None:
            number, text = refusal
            raise errors[number](f"in process {process}: {text}")
    return [found for found, _ in answers]

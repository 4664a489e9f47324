"""What processes tell each other about a checkpoint besides its arrays: that it is complete, or what is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from jaxpp_flax.processes.group import process_group

__all__ = ["all_faults", "done_by_one", "everyones", "of_whoever_knows"]

# Seconds. Long, since a process may have a large checkpoint's files to read; one that fails is told of sooner.
_TIMEOUT = 3600.0


def done_by_one(name: str, function: Callable[[], Any], *errors: type[Exception]) -> None:
    """Process 0 calls `function`, the others wait for it; if it fails there, all of them fail.

    Args:
      name: what is done, for the errors of those who wait.
      function: returns nothing.
      errors: what the other processes raise, with the message of what process 0 raised: the first of these that this
        was, or else the last.

    Example:
      >>> done_by_one("greeting", lambda: print("done"), OSError)
      done
    """
    group = process_group()
    failure: Exception | None = None
    if group.process_index == 0:
        try:
            function()
        except Exception as caught:
            failure = caught
    kind = next((i for i, error in enumerate(errors) if isinstance(failure, error)), len(errors) - 1)
    message = "" if failure is None else f"{kind} in process 0: {failure}"
    answer = group.exchange(f"checkpoint: {name}", message.encode(), _TIMEOUT)[0].decode()
    if failure is not None:
        raise failure
    if answer:
        number, _, text = answer.partition(" ")
        raise errors[int(number)](text)


def all_faults(name: str, faults: Sequence[str]) -> list[str]:
    """What all processes found wrong, in each of them.

    Raises:
      BarrierTimeoutError, ProcessFailedError: if a process does not come; those below raise them, too.

    Example:
      >>> all_faults("files", ["a: missing"])
      ['a: missing']
    """
    return [fault for answer in everyones(name, list(faults)) for fault in answer]


def everyones(name: str, value: Any) -> list[Any]:
    """Each process's value, as JSON knows it, in the order of the processes.

    Example:
      >>> everyones("position", {"batches": 3})
      [{'batches': 3}]
    """
    answers = process_group().exchange(f"checkpoint: {name}", json.dumps(value).encode(), _TIMEOUT)
    return [json.loads(answer) for answer in answers]


def of_whoever_knows(name: str, value: Any) -> Any:
    """The value of the first process that has one, where None says that this one has not.

    Example:
      >>> of_whoever_knows("step", 4)
      4
    """
    return next(answer for answer in everyones(name, value) if answer is not None)

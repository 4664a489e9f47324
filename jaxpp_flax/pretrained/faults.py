"""What is wrong with weights, in a few lines: faults that repeat from layer to layer are told once, with a remedy."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from jaxpp_flax.globs import covering_globs

__all__ = ["grouped", "keep_remedy"]

_LISTED = 24  # lines of a message
_MOST_GLOBS = 4  # that a remedy names: more of them describe no adapters and no head, but another model
_NUMBER = re.compile(r"(?<=[./_-])\d+")  # a number in a name: of a layer, or of a shard; not a size


def grouped(faults: Iterable[str]) -> list[str]:
    """Return lines for faults, `path: text` each; those that differ in the numbers of their names alone share a line.

    Example:
      >>> grouped([f"blocks/{i}/w: w.{i} has shape (2,)" for i in range(12)] + ["head/w: w has shape (3,)"])
      ['blocks/*/w: 12 times, first at blocks/0/w: w.0 has shape (2,)', 'head/w: w has shape (3,)']
    """
    same: dict[str, list[str]] = {}
    for fault in faults:
        same.setdefault(_NUMBER.sub("*", fault), []).append(fault)
    lines = [
        of[0] if len(of) == 1 else f"{key.partition(': ')[0]}: {len(of)} times, first at {of[0]}"
        for key, of in same.items()
    ]
    more = len(lines) - _LISTED
    if more <= 0:
        return lines
    return [*lines[:_LISTED], f"and {more} more kinds of faults. Are these the weights of this model, with its sizes?"]


def keep_remedy(lacking: Collection[str], others: Collection[str], keep: object) -> str | None:
    """Return how to keep the values of leaves that the files lack; None if no few globs name exactly these.

    Args:
      lacking: the paths of these leaves.
      others: the paths of the model's other leaves.
      keep: the argument as it was given.

    Example:
      >>> keep_remedy(["a/lora/lora_a", "a/lora/lora_b"], ["a/kernel"], ())
      'The files lack 2 leaves. To keep their values in the model, as of adapters or a new head: keep="a/lora/*"'
    """
    globs = covering_globs([*lacking], others, _MOST_GLOBS) if others else []
    if not globs:  # or nothing of the model is in the files
        return None
    count = "1 leaf" if len(lacking) == 1 else f"{len(lacking)} leaves"
    value = "its value" if len(lacking) == 1 else "their values"
    start = f"The files lack {count}. To keep {value} in the model, as of adapters or a new head: "
    if callable(keep):
        return f"{start}a function keep= that also names {' and '.join(globs)}"
    before = [keep] if isinstance(keep, str) else list(keep)  # type: ignore[call-overload]
    texts = ", ".join(f'"{of}"' for of in [*before, *globs])
    return f"{start}keep={texts if len(before) + len(globs) == 1 else f'[{texts}]'}"

"""What is wrong with weights, in a few lines: faults that repeat from layer to layer are told once, with a remedy."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from jaxpp_flax.globs import matches

__all__ = ["covering_globs", "grouped", "keep_remedy"]

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
      'The files lack 2 leaves. To keep their values in the model, as of adapters or a new head: keep="*/lora_*"'
    """
    globs = covering_globs(lacking, others)
    if not globs:
        return None
    count = "1 leaf" if len(lacking) == 1 else f"{len(lacking)} leaves"
    value = "its value" if len(lacking) == 1 else "their values"
    start = f"The files lack {count}. To keep {value} in the model, as of adapters or a new head: "
    if callable(keep):
        return f"{start}a function keep= that also names {' and '.join(globs)}"
    before = [keep] if isinstance(keep, str) else list(keep)  # type: ignore[call-overload]
    texts = ", ".join(f'"{of}"' for of in [*before, *globs])
    return f"{start}keep={texts if len(before) + len(globs) == 1 else f'[{texts}]'}"


def covering_globs(lacking: Collection[str], others: Collection[str]) -> list[str]:
    """Return at most four globs that match all paths of `lacking` and none of `others`; nothing if there are none.

    Example:
      >>> covering_globs(["head/kernel", "head/bias"], ["body/kernel"])
      ['head/*']
      >>> covering_globs(["blocks/0/gate", "blocks/1/gate", "norm/scale"], ["blocks/0/w", "blocks/1/w", "norm/bias"])
      ['*/gate', '*/scale']
    """
    left, found = dict.fromkeys(lacking), list[str]()
    if not others:  # nothing of the model is in the files
        return []
    for candidates in (_common, _own):
        while left and len(found) < _MOST_GLOBS:
            best = _best(list(left), others, candidates)
            if best is None:
                break
            found.append(best)
            left = dict.fromkeys(path for path in left if not matches(path, best))
    return [] if left else found


def _best(left: Sequence[str], others: Collection[str], candidates: Callable[[str], Iterator[str]]) -> str | None:
    """Return the candidate that matches most paths and none of `others`; of equal ones the first."""
    globs = dict.fromkeys(glob for path in left for glob in candidates(path))
    counts = {glob: sum(matches(path, glob) for path in left) for glob in globs}
    for glob in sorted(counts, key=lambda of: -counts[of]):
        if not any(matches(path, glob) for path in others):
            return glob
    return None


def _common(path: str) -> Iterator[str]:
    """Return globs that leaves of several layers may share."""
    *parents, last = path.split("/")
    if parents:
        if (stem := last.partition("_")[0]) != last:
            yield f"*/{stem}_*"
        yield f"{parents[0]}/*"
        yield from (f"*/{part}/*" for part in parents[1:] if not part.isdigit())
        yield f"*/{last}"


def _own(path: str) -> Iterator[str]:
    """Return globs of one layer, and the path."""
    parts = path.split("/")
    yield from (f"{'/'.join(parts[:stop])}/*" for stop in range(1, len(parts)))
    yield path

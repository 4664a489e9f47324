"""Schedules by name, for configuration files and command lines."""

from __future__ import annotations

import inspect
from typing import Any

from jaxpp_flax.messages import known_names
from jaxpp_flax.schedules.errors import ScheduleError
from jaxpp_flax.schedules.families.basic import Eager1F1B, GPipe, GPipe1F1BLast, Std1F1B, ZeroBubble, ZeroBubbleH2
from jaxpp_flax.schedules.families.interleaved import (
    Circular,
    CircularReversed,
    Interleaved1F1B,
    InterleavedGPipe,
    KimiK2,
)
from jaxpp_flax.schedules.families.v_shaped import ZBV, DualPipeV
from jaxpp_flax.schedules.schedule import Schedule

_NAMED: dict[str, tuple[type[Schedule], dict[str, Any]]] = {
    "gpipe": (GPipe, {}),
    "1f1b": (Std1F1B, {}),
    "eager_1f1b": (Eager1F1B, {}),
    "gpipe_1f1b_last": (GPipe1F1BLast, {}),
    "interleaved_1f1b": (Interleaved1F1B, {}),
    "interleaved_gpipe": (InterleavedGPipe, {}),
    "kimi_k2": (KimiK2, {}),
    "circular": (Circular, {}),
    "circular_reversed": (CircularReversed, {}),
    "zero_bubble": (ZeroBubble, {}),
    "zero_bubble_h2": (ZeroBubbleH2, {}),
    "zero_bubble_h2_half_latency": (ZeroBubbleH2, {"latency": 0.5}),
    "zero_bubble_h2_full_latency": (ZeroBubbleH2, {"latency": 1.0}),
    "zbv": (ZBV, {}),
    "dualpipe_v": (DualPipeV, {}),
}
# Other names of an order: always, and where a rank has one stage.
_ALIASES = {"latency_hiding_1f1b": "eager_1f1b"}
_AT_ONE_STAGE_A_RANK = {"interleaved_1f1b": "eager_1f1b", "interleaved_gpipe": "gpipe", "circular": "gpipe"}


def names(num_stages: int | None = None, num_ranks: int | None = None) -> list[str]:
    """Return the names of the schedules that can run these counts; without counts, of all schedules.

    Each order of tasks is listed once. :func:`by_name` accepts further names for some of them.

    >>> "1f1b" in names()
    True
    >>> names(num_stages=8, num_ranks=4)[-2:]
    ['zbv', 'dualpipe_v']
    >>> "circular" in names(num_stages=4)  # with one stage on each rank it is gpipe
    False
    """
    if num_stages is None:
        return list(_NAMED)
    fitting: list[str] = []
    for name in _NAMED:
        if name in _AT_ONE_STAGE_A_RANK and num_ranks in (None, num_stages):
            continue
        try:
            by_name(name, num_stages, num_ranks)
        except ScheduleError:
            continue
        fitting.append(name)
    return fitting


def _plain(name: str) -> str:
    return "".join(c for c in name.lower() if c.isalnum())


def by_name(name: str, num_stages: int, num_ranks: int | None = None, **options: Any) -> Schedule:
    """Return the schedule called ``name``; case, dashes and underscores do not matter.

    Args:
        name: one of :func:`names`, the name of a class, or another name of a schedule: ``latency_hiding_1f1b`` is
            ``eager_1f1b``, and with one stage on each rank, ``circular`` is ``gpipe``.
        num_stages: number of stages of the model.
        num_ranks: number of ranks; by default one for each stage, or for a V-shaped schedule one for two stages.
        options: further arguments of the class, such as ``latency``.

    Raises:
        ValueError: if the name is unknown; the message suggests similar names.
        ScheduleError: if the schedule cannot run these counts, or has no such option.

    >>> by_name("interleaved-1F1B", num_stages=8, num_ranks=4)
    Interleaved1F1B(num_stages=8, num_ranks=4)
    >>> by_name("1f1", 4)
    Traceback (most recent call last):
    ValueError: unknown schedule '1f1'. Did you mean '1f1b'? Known: gpipe, 1f1b, ...
    """
    key_of = {_plain(cls.__name__): key for key, (cls, _) in reversed(_NAMED.items())}
    key_of |= {_plain(key): key for key in _NAMED} | {_plain(alias): key for alias, key in _ALIASES.items()}
    key = key_of.get(_plain(str(name)))
    if key is None:
        raise ValueError(f"unknown schedule {name!r}.{known_names(str(name).lower(), _NAMED)}")
    if num_ranks in (None, num_stages) and not options:
        key = _AT_ONE_STAGE_A_RANK.get(key, key)
    cls, extra = _NAMED[key]
    unknown = set(options) - set(inspect.signature(cls.__init__).parameters)
    if unknown:
        raise ScheduleError(f"schedule {name!r} has no option {', '.join(map(repr, sorted(unknown)))}")
    return cls(num_stages, num_ranks, **(extra | options))

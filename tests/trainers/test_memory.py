"""No device holds more than its share of a model and one leaf, whatever call is made of a trainer."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jaxpp_flax.engine.arrays.mpmd_array import MpmdArray
from jaxpp_flax.pretrained import exporting
from jaxpp_flax.trainers.state import first_values
from tests.trainers.lives import LAYERS, LIVES, RANKS, data, live, live_bytes, num_bytes

WIDTH = 64
LEAF = WIDTH * WIDTH * 4
SMALL = 8 * 1024  # counters, batches and activations: half a leaf


class Peak:
    """The most bytes on a device beyond those of the beginning; sampled after each leaf too."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        gc.collect()
        self._before, self.most, self.samples = live_bytes(WIDTH), 0, 0
        for owner, name in (
            (MpmdArray, "__init__"),
            (MpmdArray, "delete"),
            (first_values._Program, "__call__"),
            (exporting, "write_part"),
        ):
            monkeypatch.setattr(owner, name, self._sampled(getattr(owner, name)))

    def _sampled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def sampled(*arguments: Any, **options: Any) -> Any:
            result = function(*arguments, **options)
            self.look()
            return result

        return sampled

    def look(self) -> None:
        now = live_bytes(WIDTH)
        self.samples += 1
        self.most = max(self.most, max(now[device] - self._before[device] for device in now))


@pytest.mark.slow
def test_no_device_holds_more_than_its_share_in_any_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    state = LIVES["new"].trainer(WIDTH).held.memory
    assert num_bytes(state) >= RANKS * (3 * LAYERS * LEAF // RANKS)
    peak, over = Peak(monkeypatch), dict[str, float]()

    def watched(name: str, call: Callable[[], Any], share: int) -> None:
        gc.collect()
        peak.most = 0
        call()
        peak.look()
        if peak.most > share + LEAF + SMALL:
            over[name] = round((peak.most - share) / LEAF, 2)

    live(tmp_path, WIDTH, watched)
    assert over == {}, "leaves beyond the share"
    assert peak.samples > 200
    assert data(WIDTH).nbytes < SMALL

"""Run by `test_callbacks.py` as two processes: what callbacks and the tracker of `fit` do in each, printed as JSON."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any

from tests.processes.running import join_run, tell

join_run()

import jax  # noqa: E402
import numpy as np  # noqa: E402

from jaxpp_flax import DictTracker, JsonlTracker, Tracker  # noqa: E402
from jaxpp_flax.trainers import Callback, Logging  # noqa: E402
from jaxpp_flax.trainers.callbacks import Profile, TimeLimit  # noqa: E402
from jaxpp_flax.trainers.trackers import CompositeTracker  # noqa: E402
from tests.checkpoint.program import batches, make_trainer  # noqa: E402

ME = jax.process_index()
DIRECTORY = Path(sys.argv[1])
DATA = list(batches(20))


class Calls(Tracker):
    """Notes its calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def log(self, metrics: Any, *, step: int) -> None:
        self.calls.append(f"{step} {' '.join(sorted(set(metrics) & {'loss', 'samples'}))}")

    def log_config(self, config: Any) -> None:
        self.calls.append(f"config of {config['num_processes']} processes")

    def close(self, error: Any = None) -> None:
        self.calls.append("close")


class ClockRunsAhead(Callback):
    """After step 3, the clock of process 1 alone is over the limit."""

    def __init__(self, limit: TimeLimit) -> None:
        super().__init__()
        self.limit = limit

    def on_step(self, trainer: Any, record: Any) -> None:
        if ME == 1 and record.step == 3:
            self.limit._start -= 1e6


def tasks_in_trace() -> list[str]:
    """The tasks of the trace of this process: each `process_N` folder must have one file."""
    (file,) = (DIRECTORY / "profile" / f"process_{ME}").rglob("*.trace.json.gz")
    with gzip.open(file) as opened:
        found = {event.get("args", {}).get("hlo_module", "") for event in json.load(opened)["traceEvents"]}
    return sorted(name.removeprefix("jit_") for name in found if name.startswith(("jit_fwd", "jit_bwd")))


calls, kept, predicted = Calls(), DictTracker(), []
tracker = CompositeTracker(calls, kept, JsonlTracker(DIRECTORY / f"rows_{ME}.jsonl"))
trainer = make_trainer(None, logging=Logging(progress=False, every=2, tracker=tracker))


class Samples(Callback):
    def on_step(self, trainer: Any, record: Any) -> None:
        predicted.append(np.asarray(trainer.predict(DATA[0]["x"])))
        trainer.tracker.log({"samples": predicted[-1]}, step=record.step)


trainer.fit(
    DATA,
    steps=4,
    callbacks=[
        Profile(start=2, steps=2, directory=DIRECTORY / "profile"),
        Samples(every=2),
    ],
)
found: dict[str, Any] = {
    "tasks": tasks_in_trace(),
    "calls": calls.calls,
    "logged": {step: array.tolist() for step, array in kept.metrics.get("samples", {}).items()},
    "files": sorted(path.name for path in DIRECTORY.glob(f"rows_{ME}.jsonl")),
    "predicted": [array.tolist() for array in predicted],
}

limit = TimeLimit(1000.0)
limited = make_trainer(None)
limited.fit(DATA, callbacks=[ClockRunsAhead(limit), limit])
found["limited"] = [limited.step, limited.stopping]
tell(found)

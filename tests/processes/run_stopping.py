"""Run by `test_stopping.py` as two processes: one of them ends `fit`, in several ways. Prints where both stand then."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.processes.running import join_run, run_case

join_run()

import jax  # noqa: E402

from jaxpp_flax.trainers import Callback, Checkpoints  # noqa: E402
from jaxpp_flax.trainers.callbacks import EarlyStopping  # noqa: E402
from tests.checkpoint.program import batches, make_trainer  # noqa: E402

ME = jax.process_index()
DIRECTORY = Path(sys.argv[1])
DATA = list(batches(20))


class At(Callback):
    """Calls a function of the trainer after a step, in some processes."""

    def __init__(self, step: int, processes: set[int], function: Callable[[Any], None]) -> None:
        super().__init__()
        self.at = step if ME in processes else None
        self.function = function

    def on_step(self, trainer: Any, record: Any) -> None:
        if record.step == self.at:
            self.function(trainer)


class Evaluated(Callback):
    """Stops at an evaluation, in process 0 alone."""

    def on_evaluate(self, trainer: Any, step: int, metrics: Any) -> None:
        if ME == 0 and step == 4:
            trainer.stop("process 0 has seen enough")


class Begun(Callback):
    """Stops before the first step, in process 1 alone."""

    def on_fit_start(self, trainer: Any) -> None:
        if ME == 1:
            trainer.stop("process 1 does not begin")


def interrupt(_: Any) -> None:
    os.kill(os.getpid(), signal.SIGINT)


def interrupted(directory: Path, processes: set[int]) -> str:
    trainer = make_trainer(Checkpoints(directory, every=5))
    try:
        trainer.fit(DATA, callbacks=[At(3, processes, interrupt)])
    except KeyboardInterrupt as error:
        whole = make_trainer(None)
        again = make_trainer(directory)
        again.fit(DATA, steps=12, resume=True)
        whole.fit(DATA, steps=12)
        same = float(again.evaluate(DATA[:2])["loss"]) == float(whole.evaluate(DATA[:2])["loss"])
        return f"step {trainer.step}, {' '.join(error.__notes__).replace(str(directory), 'it')}, as if never: {same}"
    return "not interrupted"


signal.signal(signal.SIGINT, signal.default_int_handler)  # as in a program that a user starts
stopped = make_trainer(None)
run_case("one process", lambda: stopped.fit(DATA, callbacks=[At(3, {1}, lambda t: t.stop("a clock"))]) and stopped.step)
run_case("its reason", lambda: stopped.stopping)
run_case("again", lambda: stopped.fit(DATA, steps=9) and stopped.step)
run_case("both", lambda: stopped.fit(DATA, callbacks=[At(18, {0, 1}, lambda t: t.stop("both"))]) and stopped.step)
evaluated = make_trainer(None)
evaluated.fit(DATA, callbacks=[Evaluated()], eval_data=DATA[:1], eval_every=2)
run_case("at an evaluation", lambda: (evaluated.step, evaluated.stopping))
early = make_trainer(None)
early.fit(DATA, callbacks=[EarlyStopping(patience=1, min_delta=1e9)], eval_data=DATA[:1], eval_every=1)
run_case("early stopping", lambda: early.step)
begun = make_trainer(None)
begun.fit(DATA, callbacks=[Begun()])
run_case("before the first step", lambda: (begun.step, begun.stopping))
run_case("interrupted", lambda: interrupted(DIRECTORY / "one", {1}))
run_case("both interrupted", lambda: interrupted(DIRECTORY / "both", {0, 1}))

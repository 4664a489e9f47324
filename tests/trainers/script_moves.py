"""What random trainer scripts are made of: settings, limits, data, events, and the callbacks that scripts pass."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from jaxpp_flax.trainers.callbacks import Callback
from tests.trainers.script_data import Data, happen
from tests.trainers.script_model import Event, Fit, Run

SETTINGS = st.fixed_dictionaries(
    {
        "stages": st.sampled_from([1, 2]),
        "saves": st.fixed_dictionaries(
            {
                "every": st.sampled_from([None, 1, 2, 3]),
                "keep": st.sampled_from([None, None, 1, 2]),
                "asynchronous": st.booleans(),
            }
        ),
    }
)
ENDINGS = ["raise", "ctrl_c", "sigterm"]


class Does(Callback):
    """An event of the script, once."""

    def __init__(self, event: Event):
        super().__init__()
        self.event: Event | None = event

    def _do(self, hook: str, trainer: Any, step: int) -> None:
        event = self.event
        if event is None or event.hook != hook or step < event.step:
            return
        self.event = None
        if event.what == "stop":
            trainer.stop("the script says so")
        else:
            happen(event.what)  # type: ignore[arg-type]

    def on_fit_start(self, trainer: Any) -> None:
        self._do("on_fit_start", trainer, trainer.step)

    def on_step(self, trainer: Any, record: Any) -> None:
        self._do("on_step", trainer, record.step)

    def on_metrics(self, trainer: Any, step: int, metrics: Any) -> None:
        self._do("on_metrics", trainer, step)

    def on_evaluate(self, trainer: Any, step: int, metrics: Any) -> None:
        self._do("on_evaluate", trainer, step)


def _rarely(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(st.none(), st.none(), strategy)


@st.composite
def data_sets(draw: Any, endings: list[str] = ENDINGS) -> Data:
    kind = draw(st.sampled_from(["list", "dataset", "generator", "iterator"]))
    event = draw(_rarely(st.tuples(st.integers(0, 7), st.sampled_from(endings))))
    return Data(kind=kind, size=draw(st.sampled_from([4, 4, 8])), event=event)


@st.composite
def limits(draw: Any, runs_once: bool) -> tuple[int | None, int | None]:
    """`steps` beyond those done, and `epochs`."""
    which = draw(st.sampled_from(["steps", "steps", "steps", "epochs", "both", "neither"]))
    steps = draw(st.sampled_from([1, 2, 3, 5, 0, 7])) if which in ("steps", "both") else None
    epochs = draw(st.integers(1, 1 if runs_once else 3)) if which in ("epochs", "both") else None
    return steps, epochs


EVENTS = st.builds(
    Event,
    hook=st.sampled_from(["on_step", "on_step", "on_fit_start", "on_metrics", "on_evaluate"]),
    step=st.integers(0, 4),
    what=st.sampled_from(["stop", *ENDINGS]),
) | st.builds(Event, hook=st.just("in_step"), step=st.integers(1, 4), what=st.just("ctrl_c"))


@st.composite
def fits(draw: Any, run: Run, resume: Any, held: Data | None) -> Fit:
    """A `fit` of whatever kind; `held` is what the iterator of the one before gives, which may go on."""
    drawn = run.stream.at if held is not None and run.stream is not None and draw(st.booleans()) else None
    data = draw(data_sets()) if held is None or drawn is None else held
    more, epochs = draw(limits(data.runs_once))
    begin = max(run.disk, default=run.state.step) if resume else run.state.step
    event, evaluates = draw(_rarely(EVENTS)), draw(st.booleans())
    return Fit(
        data=data, drawn=drawn, resume=resume, epochs=epochs,
        steps=None if more is None else max(1, more + (begin if resume else 0)),
        resume_data=draw(st.sampled_from(["fast_forward", "fast_forward", "refuse", "restart"])),
        evaluates=evaluates, eval_every=draw(st.sampled_from([None, 1, 2])),
        event=None if event is None else replace(event, step=begin + event.step),
        stops_early=evaluates and draw(st.booleans()),  # without evaluations, it is refused
    )  # fmt: skip


@st.composite
def continuations(draw: Any, run: Run) -> Fit:
    """A few steps more, by `fit(resume=True)`."""
    steps = max(run.disk, default=run.state.step) + draw(st.integers(1, 4))
    return Fit(data=replace(draw(data_sets()), event=None), steps=steps, resume=True)

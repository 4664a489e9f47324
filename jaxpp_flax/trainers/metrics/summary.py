"""The last lines of a run: what it did, and after a crash how to go on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from jaxpp_flax.trainers.metrics.clock import Part
from jaxpp_flax.trainers.metrics.run_metrics import stepping_seconds

__all__ = ["after_error", "summarise_run"]

# The words of the summary. A dispatch counts as device time: on CPU it may run the computation itself, and on other
# devices it is short, or it waits because the devices are behind.
_NAMED: Mapping[str, tuple[Part, ...]] = {
    "for devices": ("dispatch", "device"),
    "waiting for data": ("data",),
    "saving": ("save",),
    "compiling": ("compilation",),
    "evaluating": ("evaluation",),
    "restoring": ("restore",),
    "placing the state": ("placement",),
    "other": ("other",),
}


def summarise_run(
    step: int,
    steps: int,
    seconds: Mapping[str, float],
    units: tuple[int, str],
    best: tuple[str, float, int] | None,
    directory: Path | None,
) -> str:
    """Return the lines that `fit` prints at its end.

    Args:
      step: the number of the last step.
      steps: the steps of this run.
      seconds: the run's time by part.
      units: the units of all steps, such as tokens, and their name.
      best: the name of a metric, its best value and the step of that value.
      directory: the directory of checkpoints.

    Example:
      >>> print(summarise_run(30, 20, {"dispatch": 1.0, "device": 7.0, "compilation": 2.0}, (4000, "tokens"),
      ...                     ("eval_loss", 1.25, 20), Path("run")))
      20 steps, up to step 30, in 0:00:10
      after compiling: 0.4 s a step, 500 tokens/s; compiling took 2 s
      time: for devices 80%, compiling 20%
      best eval_loss 1.2500 at step 20; checkpoints in run
    """
    total = max(sum(seconds.values()), 1e-9)
    parts = [(sum(seconds.get(part, 0.0) for part in of), name) for name, of in _NAMED.items()]
    shares = sorted(((of / total, name) for of, name in parts if of >= 0.005 * total), reverse=True)
    hours, rest = divmod(round(total), 3600)
    stepping = max(stepping_seconds(seconds), 1e-9)
    compiling = sum(seconds.get(part, 0.0) for part in _NAMED["compiling"])
    lines = [
        f"{steps} step{'' if steps == 1 else 's'}, up to step {step}, in {hours}:{rest // 60:02d}:{rest % 60:02d}",
        f"after compiling: {stepping / max(steps, 1):.3g} s a step, {units[0] / stepping:,.0f} {units[1]}/s; "
        f"compiling took {compiling:.3g} s",
        f"time: {', '.join(f'{name} {share:.0%}' for share, name in shares)}",
    ]
    more = []
    if best is not None:
        more.append(f"best {best[0]} {best[1]:.4f} at step {best[2]}")
    if directory is not None:
        more.append(f"checkpoints in {directory}")
    return "\n".join([*lines, *(["; ".join(more)] if more else [])])


def after_error(step: int, saved: int | None, directory: Path | None, again: str = "fit(..., resume=True)") -> str:
    """Return what to do after an error of a loop.

    Args:
      step: the last step.
      saved: the step of the newest checkpoint.
      directory: the directory of checkpoints.
      again: the call that goes on from a checkpoint.

    Example:
      >>> after_error(25, 20, Path("run")).partition(": ")[2]
      'it goes on from step 20 of run.'
    """
    begin = f"Training stopped after step {step}."
    if directory is None:
        return (
            f"{begin} Nothing was saved: pass checkpoints=Checkpoints(directory, every=...), and {again} goes on from "
            "the latest checkpoint."
        )
    if saved is None:
        return f"{begin} {directory} holds no checkpoint yet, so the next run starts again. Save more often: every=."
    return f"{begin} Fix the cause and run again with {again}: it goes on from step {saved} of {directory}."

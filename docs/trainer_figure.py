"""The drawing of a batch's and a leaf's way through the trainer: `docs/figures.py` writes it."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import jaxpp_flax
from jaxpp_flax.checkpoint.checkpoint_store import CheckpointStore
from jaxpp_flax.checkpoint.format.handler import MpmdArrayHandler
from jaxpp_flax.checkpoint.reading import RestorePlan
from jaxpp_flax.engine.compiled import Compiled
from jaxpp_flax.trainers.callbacks.log_metrics import LogMetrics
from jaxpp_flax.trainers.checkpoints import Checkpointing
from jaxpp_flax.trainers.data.batch import split_batch
from jaxpp_flax.trainers.data.batch_sharding import BatchSharding
from jaxpp_flax.trainers.data.stream import Batches
from jaxpp_flax.trainers.loop.training_loop import TrainingLoop
from jaxpp_flax.trainers.state.first_values import LeafPrograms
from jaxpp_flax.trainers.state.holder import StateHolder
from jaxpp_flax.trainers.state.placement import put_on_ranks
from jaxpp_flax.trainers.state.sources import Checkpoint, Factory
from jaxpp_flax.trainers.step.compiled_steps import CompiledSteps
from jaxpp_flax.trainers.step.nonfinite import StepsUnderWay
from jaxpp_flax.trainers.steps import StepCalls
from jaxpp_flax.trainers.trackers import Tracker
from step_figure import text

__all__ = ["svg_of_trainer"]

_Walk: TypeAlias = (
    "Sequence[tuple[str, Any]]"  # what happens, and the class or function that does it
)

_BATCH: _Walk = (
    ("`fit` runs the loop and its callbacks", TrainingLoop),
    ("a batch is drawn, and its position in the data is noted", Batches),
    ("one optimizer step begins", StepCalls),
    ("rows of several processes become one batch", BatchSharding),
    ("the batch is cut into microbatches", split_batch),
    ("the step compiled for these shapes is found, or made", CompiledSteps),
    (
        "each leaf goes to the devices of the ranks that read it; the program runs",
        Compiled,
    ),
    ("back: the loss of an earlier step is looked at", StepsUnderWay),
    ("metrics come to the host, one step late", LogMetrics),
    ("a row is written", Tracker),
)
_LEAF: _Walk = (
    ("a source knows paths and shapes", Factory),
    (
        "the leaf is a shape, until a step is compiled and says where it lives",
        StateHolder,
    ),
    ("its own program makes its value; equal leaves share one program", LeafPrograms),
    ("the value goes to its ranks: the leaf is an array at its place", put_on_ranks),
    ("a save is due", Checkpointing),
    (
        "a directory is written in the background, and complete after a rename",
        CheckpointStore,
    ),
    ("each process writes the shards that it holds", MpmdArrayHandler),
    (
        "back: all differences from the target are listed before anything is read",
        RestorePlan,
    ),
    (
        "the checkpoint is a source like the first one, for any number of stages",
        Checkpoint,
    ),
)
_WIDTH, _ROW, _LEFT, _FILES, _TOP = 900, 20, 12, 500, 34


def svg_of_trainer() -> str:
    """Draw two walks: each line is what happens, the class or function that does it, and its file."""
    out: list[str] = []
    y = 8.0
    walks = (("A batch, from `fit` to devices, and its metrics back", "#cfe3f3", _BATCH), (
        "A leaf of the state, from its source to its place, to disk and back", "#d9ead3", _LEAF,
    ))  # fmt: skip
    for title, fill, walk in walks:
        height = _TOP + _ROW * len(walk)
        out.append(
            f'<rect x="4" y="{y:g}" width="{_WIDTH - 8}" height="{height - 6}" rx="4" fill="{fill}"/>'
        )
        out.append(text(_LEFT, y + 18, title, "bold"))
        for line, (what, where) in enumerate(walk):
            at = y + _TOP + 4 + _ROW * line
            file = (
                Path(inspect.getfile(where))
                .relative_to(Path(jaxpp_flax.__file__).parent)
                .as_posix()
            )
            out.append(text(_LEFT + 12, at, f"{line + 1}. {what}"))
            out.append(text(_FILES, at, f"{where.__name__}, {file}"))
        y += height
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{y + 4:g}" font-family="sans-serif">'
        f'<rect width="100%" height="100%" fill="white"/>{"".join(out)}</svg>\n'
    )

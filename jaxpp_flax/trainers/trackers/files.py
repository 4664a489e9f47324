"""Trackers that write files: JSON lines, and events for TensorBoard."""

from __future__ import annotations

import importlib
import json
import os
import time
from collections.abc import Mapping
from typing import Any

from jaxpp_flax.checkpoint.format.locations import is_on_disk, location
from jaxpp_flax.trainers.trackers.base import Tracker
from jaxpp_flax.trainers.trackers.values import need_package, plain_value, scalar_or_text

__all__ = ["JsonlTracker", "TensorBoardTracker"]

_SECONDS_BETWEEN_OBJECTS = 60.0


class JsonlTracker(Tracker):
    """Appends one line with a JSON object for each call; in a file, each line is complete after the call.

    JSON has no NaN and no infinities: these are written as strings (`"nan"`).

    An object in a bucket cannot be appended to: the whole object is written again, at most once a minute and at the
    end.

    Args:
      path: the path of the file; its folder is made if it does not exist. Or a URL, `gs://` or `s3://`.

    Example:
      >>> import tempfile
      >>> from pathlib import Path
      >>> path = Path(tempfile.mkdtemp()) / "metrics.jsonl"
      >>> tracker = JsonlTracker(path)
      >>> tracker.log({"loss": 2.0}, step=1)
      >>> path.read_text()
      '{"step": 1, "loss": 2.0}\\n'
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = location(path)
        self._text: str | None = None  # of an object in a bucket
        self._written = -_SECONDS_BETWEEN_OBJECTS

    def log(self, metrics: Mapping[str, Any], *, step: int) -> None:
        self._write({"step": step, **{name: plain_value(value) for name, value in metrics.items()}})

    def log_config(self, config: Mapping[str, Any]) -> None:
        self._write({"config": {name: plain_value(value) for name, value in config.items()}})

    def _write(self, line: dict[str, Any]) -> None:
        # The file is opened for each line: a killed process loses no line, and no call has to close the file.
        text = json.dumps(line) + "\n"
        if not is_on_disk(self.path):
            if self._text is None:
                self._text = self.path.read_text(encoding="utf-8") if self.path.exists() else ""
            self._text += text
            if time.monotonic() - self._written >= _SECONDS_BETWEEN_OBJECTS:
                self.close()
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(text)

    def close(self, error: BaseException | None = None) -> None:
        if self._text is not None:
            self.path.write_text(self._text, encoding="utf-8")
            self._written = time.monotonic()


class TensorBoardTracker(Tracker):
    """Writes scalars and texts for TensorBoard; needs the extra `tensorboard`. The first call opens the file.

    An array is written as a text; of more than 1,000 numbers, NumPy shows only the first and the last ones.

    Args:
      log_dir: the run's folder.

    Raises:
      ImportError: without `tensorboardX`.
    """

    def __init__(self, log_dir: str | os.PathLike[str]) -> None:
        need_package("tensorboardX", "tensorboard")
        self._log_dir, self._opened = os.fspath(log_dir), None

    @property
    def _writer(self) -> Any:
        if self._opened is None:
            self._opened = importlib.import_module("tensorboardX").SummaryWriter(self._log_dir)
        return self._opened

    def log(self, metrics: Mapping[str, Any], *, step: int) -> None:
        for name, value in metrics.items():
            shown = scalar_or_text(value)
            if not isinstance(shown, str):
                self._writer.add_scalar(name, shown, step)
            else:  # TensorBoard reads Markdown, in which an array is a block of code
                self._writer.add_text(name, shown if isinstance(value, str) else f"```\n{shown}\n```", step)

    def log_config(self, config: Mapping[str, Any]) -> None:
        self._writer.add_text("config", "\n".join(f"- {name}: {value}" for name, value in config.items()))

    def close(self, error: BaseException | None = None) -> None:
        if self._opened is not None:
            self._opened.close()  # `flush` alone may leave the last metrics in the queue
            self._opened = None

"""Trackers write metrics to memory, a JSONL file, TensorBoard, Weights & Biases, MLflow, or several of these."""

from __future__ import annotations

import abc
import importlib
import importlib.util
import json
import math
import os
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxpp_flax.checkpoint.format.locations import is_on_disk, location
from jaxpp_flax.trainers.callbacks.base import has_failed

__all__ = [
    "CompositeTracker",
    "DictTracker",
    "JsonlTracker",
    "MlflowTracker",
    "NoopTracker",
    "TensorBoardTracker",
    "Tracker",
    "WandbTracker",
]

_SECONDS_BETWEEN_OBJECTS = 60.0


class Tracker(abc.ABC):
    """Receives metrics that are already on the host. For your own tracker, write a subclass with `log`.

    With several processes, the tracker of process 0 alone is called: open files and connections at the first call.

    Example:
      >>> class Printer(Tracker):
      ...     def log(self, metrics, *, step):
      ...         print(step, metrics)
      >>> Printer().log({"loss": 1.5}, step=3)
      3 {'loss': 1.5}
    """

    @abc.abstractmethod
    def log(self, metrics: Mapping[str, Any], *, step: int) -> None:
        """Record `metrics` (floats, NumPy arrays or texts) of `step`."""

    def log_config(self, config: Mapping[str, Any]) -> None:  # noqa: B027 (optional)
        """Record the configuration of the run; by default, do nothing."""

    def close(self, error: BaseException | None = None) -> None:  # noqa: B027 (optional)
        """Write the remaining metrics; a loop calls this at its end, also after an error. A later `log` opens it again.

        Args:
          error: the exception that ended the loop, or None; see `jaxpp_flax.trainers.callbacks.has_failed`.
        """

    def get_state(self) -> Any:
        """Return the state that a resumed run needs to continue this run, as JSON for a checkpoint; None: no state."""
        return None

    def set_state(self, state: Any) -> None:  # noqa: B027 (optional)
        """Continue the run that `state`, from `get_state`, belongs to; a resumed `fit` calls this before `log`."""


class NoopTracker(Tracker):
    """Records nothing."""

    def log(self, metrics: Mapping[str, Any], *, step: int) -> None:
        """Record nothing."""


class DictTracker(Tracker):
    """Keeps everything in memory, which makes tests easy.

    Example:
      >>> tracker = DictTracker()
      >>> tracker.log({"loss": 2.0}, step=1)
      >>> tracker.log({"loss": 1.0}, step=2)
      >>> tracker["loss"]
      {1: 2.0, 2: 1.0}
    """

    def __init__(self) -> None:
        self.metrics: dict[str, dict[int, Any]] = {}
        self.config: dict[str, Any] = {}

    def log(self, metrics: Mapping[str, Any], *, step: int) -> None:
        for name, value in metrics.items():
            self.metrics.setdefault(name, {})[step] = value

    def log_config(self, config: Mapping[str, Any]) -> None:
        self.config.update(config)

    def __getitem__(self, name: str) -> dict[int, Any]:
        return self.metrics[name]


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
        self._write({"step": step, **{name: _plain(value) for name, value in metrics.items()}})

    def log_config(self, config: Mapping[str, Any]) -> None:
        self._write({"config": {name: _plain(value) for name, value in config.items()}})

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


class CompositeTracker(Tracker):
    """Passes everything on to several trackers.

    Example:
      >>> first, second = DictTracker(), DictTracker()
      >>> CompositeTracker(first, second).log({"loss": 2.0}, step=1)
      >>> first["loss"] == second["loss"]
      True
    """

    def __init__(self, *trackers: Tracker) -> None:
        self.trackers = trackers

    def log(self, metrics: Mapping[str, Any], *, step: int) -> None:
        for tracker in self.trackers:
            tracker.log(metrics, step=step)

    def log_config(self, config: Mapping[str, Any]) -> None:
        for tracker in self.trackers:
            tracker.log_config(config)

    def close(self, error: BaseException | None = None) -> None:
        errors: list[Exception] = []
        for tracker in self.trackers:
            try:
                tracker.close(error)
            except Exception as failed:  # the others close all the same
                errors.append(failed)
        if errors:
            raise ExceptionGroup("trackers did not close", errors)

    def get_state(self) -> Any:
        states = [tracker.get_state() for tracker in self.trackers]
        return states if any(state is not None for state in states) else None

    def set_state(self, state: Any) -> None:
        for tracker, of in zip(self.trackers, state, strict=False):  # a run may add trackers
            if of is not None:
                tracker.set_state(of)


class TensorBoardTracker(Tracker):
    """Writes scalars and texts for TensorBoard; needs the extra `tensorboard`. The first call opens the file.

    An array is written as a text; of more than 1,000 numbers, NumPy shows only the first and the last ones.

    Args:
      log_dir: the run's folder.

    Raises:
      ImportError: without `tensorboardX`.
    """

    def __init__(self, log_dir: str | os.PathLike[str]) -> None:
        _need("tensorboardX", "tensorboard")
        self._log_dir, self._opened = os.fspath(log_dir), None

    @property
    def _writer(self) -> Any:
        if self._opened is None:
            self._opened = importlib.import_module("tensorboardX").SummaryWriter(self._log_dir)
        return self._opened

    def log(self, metrics: Mapping[str, Any], *, step: int) -> None:
        for name, value in metrics.items():
            shown = _scalar_or_text(value)
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


class WandbTracker(Tracker):
    """Logs to Weights & Biases; needs the extra `wandb`. The first call opens the run.

    Checkpoints keep the run's id: `fit(resume=True)` continues the same run. `id="..."` names a run to continue. If
    `fit` ends with an error, the run ends as "failed", with exit code 1.

    Args:
      run_options: arguments of `wandb.init`: `project=`, `name=`, `id=`, ...

    Raises:
      ImportError: without `wandb`.
    """

    def __init__(self, **run_options: Any) -> None:
        _need("wandb", "wandb")
        self._options, self._opened = run_options, None

    @property
    def _run(self) -> Any:
        if self._opened is None:
            options = {"resume": "allow", **self._options} if "id" in self._options else self._options
            self._opened = importlib.import_module("wandb").init(**options)
            self._options = {**self._options, "id": self._opened.id}
        return self._opened

    def log(self, metrics: Mapping[str, Any], *, step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def log_config(self, config: Mapping[str, Any]) -> None:
        self._run.config.update(dict(config), allow_val_change=True)

    def close(self, error: BaseException | None = None) -> None:
        if self._opened is not None:
            self._opened.finish(exit_code=int(has_failed(error)))
            self._opened = None

    def get_state(self) -> Any:
        return {"id": self._options["id"]} if "id" in self._options else None

    def set_state(self, state: Any) -> None:
        if self._opened is None:
            self._options = {"id": state["id"], **self._options}


class MlflowTracker(Tracker):
    """Logs to MLflow: a server or a local store; needs the extra `mlflow`. The first call opens the run.

    Scalars become metrics, texts and arrays become artifacts `{name}/{step}.txt` (of more than 1,000 numbers, NumPy
    shows only the first and the last ones), and the configuration becomes parameters. MLflow cannot change a parameter:
    if a resumed run has another value, the new value becomes a tag of the same name. If `fit` ends with an error, the
    run ends as "FAILED". Checkpoints keep the run's id: `fit(resume=True)` continues the same run.

    Args:
      experiment: the name of the experiment; it is made if it does not exist.
      tracking_uri: the server or store; None: MLflow's own setting, such as `MLFLOW_TRACKING_URI`.
      run_name: the name of a new run.
      run_id: the id of a run to continue; None: a new run.

    Raises:
      ImportError: without `mlflow`.
    """

    def __init__(
        self,
        experiment: str = "Default",
        *,
        tracking_uri: str | None = None,
        run_name: str | None = None,
        run_id: str | None = None,
    ) -> None:
        _need("mlflow", "mlflow")
        self._experiment, self._uri, self._name, self._id = experiment, tracking_uri, run_name, run_id
        self._opened = None

    @property
    def _client(self) -> Any:
        if self._opened is None:
            client = importlib.import_module("mlflow.tracking").MlflowClient(tracking_uri=self._uri)
            if self._id is None:
                found = client.get_experiment_by_name(self._experiment)
                experiment = client.create_experiment(self._experiment) if found is None else found.experiment_id
                self._id = client.create_run(experiment, run_name=self._name).info.run_id
            else:
                client.update_run(self._id, status="RUNNING")
            self._opened = client
        return self._opened

    def log(self, metrics: Mapping[str, Any], *, step: int) -> None:
        client, now = self._client, int(time.time() * 1000)
        metric = importlib.import_module("mlflow.entities").Metric
        shown = {name: _scalar_or_text(value) for name, value in metrics.items()}
        scalars = [metric(name, of, now, step) for name, of in shown.items() if not isinstance(of, str)]
        client.log_batch(self._id, metrics=scalars)
        for name, of in shown.items():
            if isinstance(of, str):
                client.log_text(self._id, of, f"{name}/{step}.txt")

    def log_config(self, config: Mapping[str, Any]) -> None:
        client = self._client
        known = client.get_run(self._id).data.params
        for name, value in config.items():
            if name not in known:
                client.log_param(self._id, name, value)
            elif known[name] != str(value):
                client.set_tag(self._id, name, value)

    def close(self, error: BaseException | None = None) -> None:
        if self._opened is not None:
            self._opened.set_terminated(self._id, "FAILED" if has_failed(error) else "FINISHED")
            self._opened = None

    def get_state(self) -> Any:
        return None if self._id is None else {"run_id": self._id}

    def set_state(self, state: Any) -> None:
        if self._opened is None and self._id is None:
            self._id = state["run_id"]


def _need(module: str, extra: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise ImportError(
            f"this tracker needs the package {module!r}, which is not installed: `pip install 'jaxpp-flax[{extra}]'`."
        )


def _scalar_or_text(value: Any) -> float | str:
    """Return a number as a float, a text as it is, and anything else as a text: a tracker leaves no value out.

    >>> _scalar_or_text(np.float32(0.5)), _scalar_or_text(np.ones((2, 1)))
    (0.5, 'float64[2,1]\\n[[1.]\\n [1.]]')
    """
    if isinstance(value, str):
        return value
    if isinstance(value, (int, float)):
        return float(value)
    if not hasattr(value, "dtype"):
        return repr(value)
    array = np.asarray(value)
    if array.ndim == 0 and np.can_cast(array.dtype, np.float64, "same_kind"):
        return float(array)
    shape = ",".join(map(str, array.shape))
    return f"{array.dtype}[{shape}]\n{np.array2string(array, threshold=1000)}"


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, (str, int, float, bool)) or value is None:
        return value
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return repr(value)

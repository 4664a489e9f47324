"""Trackers that write to a service: Weights & Biases, and MLflow."""

from __future__ import annotations

import importlib
import time
from collections.abc import Mapping
from typing import Any

from jaxpp_flax.messages import warn_user
from jaxpp_flax.trainers.callbacks.base import has_failed
from jaxpp_flax.trainers.trackers.base import Tracker
from jaxpp_flax.trainers.trackers.values import need_package, scalar_or_text

__all__ = ["MlflowTracker", "WandbTracker"]


class WandbTracker(Tracker):
    """Logs to Weights & Biases; needs the extra `wandb`. The first call opens the run.

    Checkpoints keep the run's id: `fit(resume=True)` continues the same run. `id="..."` names a run to continue. If
    `fit` ends with an error, the run ends as "failed", with exit code 1. A run that the program has opened by
    `wandb.init` is used as it is, and left open.

    Args:
      run_options: arguments of `wandb.init`: `project=`, `name=`, `id=`, ...

    Raises:
      ImportError: without `wandb`.
    """

    def __init__(self, **run_options: Any) -> None:
        need_package("wandb", "wandb")
        self._options, self._opened, self._is_own = run_options, None, True

    @property
    def _run(self) -> Any:
        if self._opened is None:
            wandb = importlib.import_module("wandb")
            active = None if "reinit" in self._options else getattr(wandb, "run", None)
            self._is_own = active is None
            if active is not None and self._options.get("id", active.id) != active.id:
                warn_user(
                    f"the W&B run {active.id} is open, so rows go there, not to the run {self._options['id']}. Call "
                    "wandb.finish() before fit, or open that run by wandb.init(id=, resume=)."
                )
            options = {"resume": "allow", **self._options} if "id" in self._options else self._options
            self._opened = wandb.init(**options) if active is None else active
            self._options = {**self._options, "id": self._opened.id}
        return self._opened

    def log(self, metrics: Mapping[str, Any], *, step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def log_config(self, config: Mapping[str, Any]) -> None:
        self._run.config.update(dict(config), allow_val_change=True)

    def close(self, error: BaseException | None = None) -> None:
        if self._opened is not None and self._is_own:
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
    run ends as "FAILED". Checkpoints keep the run's id: `fit(resume=True)` continues the same run. `run_id=` of the run
    that is active in this program is not ended.

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
        need_package("mlflow", "mlflow")
        self._experiment, self._uri, self._name, self._id = experiment, tracking_uri, run_name, run_id
        self._opened, self._is_own = None, True

    @property
    def _client(self) -> Any:
        if self._opened is None:
            client = importlib.import_module("mlflow.tracking").MlflowClient(tracking_uri=self._uri)
            if self._id is None:
                found = client.get_experiment_by_name(self._experiment)
                experiment = client.create_experiment(self._experiment) if found is None else found.experiment_id
                self._id = client.create_run(experiment, run_name=self._name).info.run_id
            else:
                active = importlib.import_module("mlflow").active_run()
                self._is_own = active is None or active.info.run_id != self._id
                client.update_run(self._id, status="RUNNING")
            self._opened = client
        return self._opened

    def log(self, metrics: Mapping[str, Any], *, step: int) -> None:
        client, now = self._client, int(time.time() * 1000)
        metric = importlib.import_module("mlflow.entities").Metric
        shown = {name: scalar_or_text(value) for name, value in metrics.items()}
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
        if self._opened is not None and self._is_own:
            self._opened.set_terminated(self._id, "FAILED" if has_failed(error) else "FINISHED")
        self._opened = None

    def get_state(self) -> Any:
        return None if self._id is None else {"run_id": self._id}

    def set_state(self, state: Any) -> None:
        if self._opened is None and self._id is None:
            self._id = state["run_id"]

"""Stand-ins for the packages of W&B and MLflow: what they are asked for, in memory."""

from __future__ import annotations

import importlib.machinery
import itertools
import sys
import types
from typing import Any, ClassVar

import pytest


def install(monkeypatch: pytest.MonkeyPatch, name: str, **content: Any) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    for key, value in content.items():
        setattr(module, key, value)
    monkeypatch.setitem(sys.modules, name, module)
    return module


class WandbRun:
    def __init__(self, run_id: str):
        self.id, self.rows, self.exit_code, self.config = run_id, dict[int, Any](), None, Config()

    def log(self, row: Any, *, step: int) -> None:
        self.rows[step] = row

    def finish(self, exit_code: int = 0) -> None:
        self.exit_code = exit_code
        setattr(sys.modules["wandb"], "run", None)  # noqa: B010 (a stand-in's)


class Config(dict[str, Any]):
    def update(self, *arguments: Any, allow_val_change: bool = False) -> None:
        super().update(*arguments)


def install_wandb(monkeypatch: pytest.MonkeyPatch) -> Any:
    numbers, runs = itertools.count(1), dict[str, WandbRun]()

    def init(*, id: str | None = None, **_: Any) -> WandbRun:
        if module.run is None:
            run_id = id or f"run{next(numbers)}"
            module.run = runs.setdefault(run_id, WandbRun(run_id))
        return module.run

    module = install(monkeypatch, "wandb", init=init, run=None, runs=runs)
    return module


class MlflowClient:
    runs: ClassVar[dict[str, Any]] = {}

    def __init__(self, tracking_uri: str | None = None):
        self.uri = tracking_uri

    def get_experiment_by_name(self, name: str) -> Any:
        return types.SimpleNamespace(experiment_id="0")

    def create_run(self, experiment: str, run_name: str | None = None) -> Any:
        run_id = f"run{len(self.runs) + 1}"
        data, info = types.SimpleNamespace(params={}), types.SimpleNamespace(run_id=run_id, status="RUNNING")
        self.runs[run_id] = types.SimpleNamespace(info=info, data=data, steps=[])
        return self.runs[run_id]

    def get_run(self, run_id: str) -> Any:
        return self.runs[run_id]

    def update_run(self, run_id: str, status: str) -> None:
        self.runs[run_id].info.status = status

    def log_param(self, run_id: str, name: str, value: Any) -> None:
        self.runs[run_id].data.params[name] = str(value)

    def set_tag(self, run_id: str, name: str, value: Any) -> None:
        """Nothing to keep."""

    def log_batch(self, run_id: str, metrics: Any) -> None:
        self.runs[run_id].steps.append(metrics[0][3])

    def set_terminated(self, run_id: str, status: str) -> None:
        self.runs[run_id].info.status = status


def install_mlflow(monkeypatch: pytest.MonkeyPatch) -> Any:
    client = type("MlflowClient", (MlflowClient,), {"runs": {}})
    module = install(monkeypatch, "mlflow", active_run=lambda: module.active, active=None, client=client)
    install(monkeypatch, "mlflow.tracking", MlflowClient=client)
    install(monkeypatch, "mlflow.entities", Metric=lambda *arguments: arguments)
    return module

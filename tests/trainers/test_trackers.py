"""The trackers of TensorBoard, Weights & Biases and MLflow write what they are given."""

from __future__ import annotations

import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxpp_flax.trainers.trackers import MlflowTracker, TensorBoardTracker, WandbTracker

pytestmark = pytest.mark.extras

ARRAYS = {"one": np.float32(0.5), "logits": np.arange(4.0, dtype=np.float32).reshape(2, 2), "many": np.zeros(2000, int)}
TEXTS = {"logits": "float32[2,2]\n[[0. 1.]\n [2. 3.]]", "many": "int64[2000]\n[0 0 0 ... 0 0 0]"}


def records(file: Path) -> list[bytes]:
    """The records of a file in TensorFlow's format: length, checksum, data, checksum."""
    content, found = file.read_bytes(), []
    while content:
        (length,) = struct.unpack("<Q", content[:8])
        found.append(content[12 : 12 + length])
        content = content[16 + length :]
    return found


def test_tensorboard(tmp_path: Path):
    pytest.importorskip("tensorboardX")
    from tensorboardX.proto.event_pb2 import Event  # type: ignore[import-not-found]

    tracker = TensorBoardTracker(tmp_path)
    assert not list(tmp_path.iterdir()), "nothing is opened before the first call"
    tracker.log_config({"learning_rate": 0.5})
    for step, loss in [(1, 2.5), (2, 1.25)]:
        tracker.log({"loss": loss, "sample": "once upon"}, step=step)
    tracker.log(ARRAYS, step=3)
    tracker.close()
    (file,) = tmp_path.iterdir()
    events = [Event.FromString(record) for record in records(file)]
    scalars = [(e.step, v.tag, v.simple_value) for e in events for v in e.summary.value if v.HasField("simple_value")]
    assert scalars == [(1, "loss", 2.5), (2, "loss", 1.25), (3, "one", 0.5)]
    texts = [t for e in events for v in e.summary.value for t in v.tensor.string_val]
    arrays = [f"```\n{text}\n```".encode() for text in TEXTS.values()]
    assert texts == [b"- learning_rate: 0.5", b"once upon", b"once upon", *arrays]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the client's own
def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    tracker = WandbTracker(mode="offline", dir=str(tmp_path), project="test")
    assert not list(tmp_path.iterdir()), "nothing is opened before the first call"
    assert tracker.get_state() is None
    tracker.log_config({"learning_rate": 0.5})
    for step, loss in [(1, 2.5), (2, 1.25)]:
        tracker.log({"loss": loss}, step=step)
    assert tracker._run.config["learning_rate"] == 0.5
    tracker.close()
    (file,) = tmp_path.rglob("*.wandb")
    parts, deadline = (b"learning_rate", b"loss", b"2.5", b"1.25"), time.monotonic() + 30.0
    # `finish` of wandb 0.31 may return before its background process has written the file.
    while (missing := [part for part in parts if part not in file.read_bytes()]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not missing


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the client's own
def test_a_resumed_run_continues_the_run_of_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    options = {"mode": "offline", "dir": str(tmp_path), "project": "test"}
    trackers = [WandbTracker(**options), WandbTracker(**options)]
    trackers[0].log({"loss": 2.5}, step=1)
    trackers[0].close()
    trackers[1].set_state(trackers[0].get_state())
    trackers[1].log({"loss": 1.25}, step=2)
    trackers[0].log({"loss": 0.5}, step=3)  # after `close`, the same run is opened again
    assert trackers[0]._run.id == trackers[1]._run.id
    for tracker in trackers:
        tracker.close()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the client's own
@pytest.mark.parametrize("error", [None, ValueError("a bad batch"), KeyboardInterrupt()])
def test_a_failed_run_of_wandb_ends_as_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Any):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    tracker, codes = WandbTracker(mode="offline", dir=str(tmp_path), project="test"), list[Any]()
    tracker.log({"loss": 2.5}, step=1)
    finish = tracker._run.finish
    monkeypatch.setattr(tracker._run, "finish", lambda exit_code: finish(exit_code) or codes.append(exit_code))
    tracker.close(error)
    assert codes == [0 if error is None else 1]


def test_mlflow_without_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # a database needs more packages than the client
    uri = tmp_path.as_uri()
    first, second = (MlflowTracker("test", tracking_uri=uri, run_name="one") for _ in range(2))
    assert not list(tmp_path.iterdir()), "nothing is opened before the first call"
    assert first.get_state() is None
    first.log_config({"learning_rate": 0.5, "mesh": {"data": 2}})
    first.log({"loss": 2.5, "gradient_norm/stage_0": float("inf"), "sample": "once upon"}, step=1)
    first.log(ARRAYS, step=3)
    first.close(KeyError())
    client = mlflow.MlflowClient(tracking_uri=uri)
    run_id = first.get_state()["run_id"]
    assert client.get_run(run_id).info.status == "FAILED"

    second.set_state(first.get_state())
    second.log_config({"learning_rate": 0.25, "mesh": {"data": 2}})
    second.log({"loss": 1.25}, step=2)
    assert client.get_run(run_id).info.status == "RUNNING"
    second.close()
    run = client.get_run(run_id)
    assert (run.info.status, run.info.run_name) == ("FINISHED", "one")
    assert run.data.params == {"learning_rate": "0.5", "mesh": "{'data': 2}"}
    assert run.data.tags["learning_rate"] == "0.25"
    assert [(of.step, of.value) for of in client.get_metric_history(run_id, "loss")] == [(1, 2.5), (2, 1.25)]
    assert run.data.metrics["gradient_norm/stage_0"] == float("inf")
    assert [file.read_text() for file in tmp_path.rglob("sample/1.txt")] == ["once upon"]
    assert run.data.metrics["one"] == 0.5
    for name, text in TEXTS.items():
        assert [file.read_text() for file in tmp_path.rglob(f"{name}/3.txt")] == [text]

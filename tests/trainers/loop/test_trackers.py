"""The trackers of TensorBoard and Weights & Biases write what they are given."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from jaxpp_flax.trainers.loop.trackers import TensorBoardTracker, WandbTracker

pytestmark = pytest.mark.extras


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
    tracker.close()
    (file,) = tmp_path.iterdir()
    events = [Event.FromString(record) for record in records(file)]
    scalars = [(e.step, v.tag, v.simple_value) for e in events for v in e.summary.value if v.HasField("simple_value")]
    assert scalars == [(1, "loss", 2.5), (2, "loss", 1.25)]
    texts = [t for e in events for v in e.summary.value for t in v.tensor.string_val]
    assert texts == [b"- learning_rate: 0.5", b"once upon", b"once upon"]


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
    assert all(part in file.read_bytes() for part in (b"learning_rate", b"loss", b"2.5", b"1.25"))


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

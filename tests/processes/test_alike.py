"""Processes that hold different values where all should have the same are told, and do not train on."""

from __future__ import annotations

import pytest

from tests.processes.running import run_processes

pytestmark = [pytest.mark.slow, pytest.mark.processes]

# What each case says: "ran", or the values that differ.
EXPECTED = {
    "weights": "the initial state, where all are to have the same: .params['layers'][0]['kernel']",
    "first batch": "the batches for training, where all are to have the same: batch['y']",
    "third batch": "the batches for training, where all are to have the same: batch['y']",
    "last batch": "the batches for training, where all are to have the same: batch['x']",
    "equal": "ran",
    "left out": "ran",
    "evaluation": "the batches for evaluation, where all are to have the same: batch['y']",
    "prediction": "the batches for prediction, where all are to have the same: batch['y']",
    "argument": "where all are to have the same: argument[1]",
    "constant": "where all are to have the same: constant 0",
    "equal arguments": "ran",
}


def test_what_differs_between_processes_is_named():
    for output in run_processes(2, "run_alike.py"):
        cases = dict(
            line.removeprefix("case ").split(": ", 1) for line in output.splitlines() if line.startswith("case ")
        )
        assert cases.keys() == EXPECTED.keys(), output[-3000:]
        for name, expected in EXPECTED.items():
            assert expected in cases[name], (name, cases[name])
            if expected != "ran":
                assert "|   process 0: " in cases[name]
                assert "|   process 1: " in cases[name]
        assert "steps 4\n" in output  # what differs in the third is found after the fourth

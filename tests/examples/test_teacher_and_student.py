"""A teacher and a student on two meshes: the student learns, and labels are all that is sent."""

import re

import pytest

from tests.examples.running import run_example


@pytest.mark.slow
def test_the_student_learns():
    out = run_example("mpmd/teacher_and_student.py", "--steps", "100")
    sent = re.search(r"sends (\d+) bytes .* labels have (\d+)\)", out)
    assert sent
    assert sent[1] == sent[2]
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", out)]
    assert losses[-1] < losses[0] / 3

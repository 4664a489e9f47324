"""Programs: verification, text."""

from __future__ import annotations

import re
from dataclasses import fields, replace

import pytest

from jaxpp_flax.engine.program.program import Free, Program, ProgramTask, Run, Transfer, Wait
from jaxpp_flax.engine.tracing.ir import VerificationError
from jaxpp_flax.schedules import Std1F1B
from tests.engine.toys import built, by_hand, chain, identity, sgd_step
from tests.helpers import batch_of

ONE = ProgramTask("one", 0, identity((2,)))
RUN = Run(0, -1, 0, (0,), (1,))
GIVING = replace(ONE, donate=frozenset({0}))


@pytest.mark.parametrize(
    ("program", "says"),
    [
        (
            by_hand([Run(0, -1, 0, (5,), (1,))], [ONE], [1], 6),
            r"instruction 0 \(rank 0: v1 = one\(v5\)\) reads value 5",
        ),
        (by_hand([RUN, Free(0, (1,)), Run(0, -1, 0, (1,), (2,))], [ONE], [2], 3), "instruction 2 .* reads value 1"),
        (by_hand([RUN, Run(0, -1, 0, (0,), (2,))], [GIVING], [2], 3), "instruction 1 .* reads value 0"),
        (by_hand([RUN, RUN], [ONE], [1], 2), "makes value 1 again"),
        (by_hand([RUN, Free(0, (1,)), RUN], [ONE], [1], 2), "makes value 1 again"),
        (by_hand([RUN, Transfer(0, 1, (1, 0), (2,))], [ONE], [1], 3), "sends 2 values and receives 1"),
        (by_hand([RUN, Free(0, (1,)), Free(0, (1,))], [ONE], [0], 2), "reads value 1"),
        (by_hand([Run(0, -1, 1, (), ())], [ONE], [0], 1), "runs a task of rank 0 on rank 1"),
        (by_hand([Transfer(1, 0, (0,), (1,))], [ONE], [1], 2), "which rank 1 does not hold"),
        (by_hand([Free(0, (0,))], [ONE], [0], 1), "result 0 is missing"),
    ],
    ids=[
        "undefined",
        "freed",
        "donated",
        "made again",
        "made again when it is gone",
        "unpaired",
        "freed again",
        "elsewhere",
        "not there",
        "result",
    ],
)
def test_verify_finds(program: Program, says: str):
    with pytest.raises(VerificationError, match=says):
        program.verify()


@pytest.mark.parametrize("kind", [ProgramTask, Run, Free, Wait, Program])
def test_a_docstring_names_no_field_that_does_not_exist(kind: type):
    named = set(re.findall(r"`(\w+)", kind.__doc__ or ""))
    assert named
    assert named <= {field.name for field in fields(kind)}  # pyright: ignore[reportArgumentType]


def test_text():
    program = built(sgd_step(Std1F1B(2)), 2, chain(2), batch_of(2)).program
    lines = program.as_text().splitlines()
    assert len(lines) == len(program.instructions)
    assert any(line.startswith("rank 0: ") and "fwd_0__1(" in line for line in lines)
    assert any("bwd_0__0(" in line and " donating " in line for line in lines)
    assert any(line.startswith("rank 0 -> rank 1: send v") for line in lines)
    assert any(": free v" in line for line in lines)

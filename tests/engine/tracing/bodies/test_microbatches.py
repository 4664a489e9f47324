"""`Microbatches`: what it takes, and what it refuses by name."""

import numpy as np
import pytest

from jaxpp_flax import Microbatches


def _tokens(rows, length, dtype=np.int32):
    return {"tokens": np.zeros((rows, length), dtype)}


def test_it_is_a_sequence_of_microbatches():
    batch = Microbatches([_tokens(4, 8), _tokens(2, 16)])
    assert [microbatch["tokens"].shape for microbatch in batch] == [(4, 8), (2, 16)]
    assert batch[1]["tokens"].shape == (2, 16)
    assert "(2, 16)" in repr(batch)


@pytest.mark.parametrize(
    ("items", "text"),
    [
        ([], "no microbatch"),
        ([_tokens(2, 4), {"other": np.zeros((2, 4), np.int32)}], "microbatch 1 .* structure"),
        ([_tokens(2, 4), _tokens(2, 4, np.float32)], r"microbatch 1 .* float32\[2, 4\] at batch\['tokens'\]"),
        ([_tokens(2, 4), {"tokens": np.zeros(2, np.int32)}], r"int32\[2\] at batch\['tokens'\]"),
    ],
)
def test_it_refuses_what_no_step_runs(items, text):
    with pytest.raises(ValueError, match=text):
        Microbatches(items)

"""Units of a batch that the user names."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jaxpp_flax.trainers import Throughput

BATCH = {
    "tokens": np.array([[5, 7, 0], [1, 0, 0]]),
    "in": {"mask": np.array([[True, True, False], [True, False, False]])},
}


def test_padding_does_not_count():
    assert Throughput().count(BATCH) == (6, "tokens"), "guessed"
    assert Throughput("tokens", of="tokens").count(BATCH) == (3, "tokens")
    assert Throughput("words", of="in/mask").count(BATCH) == (3, "words")
    assert Throughput("tokens", of="tokens", padding=7).count(BATCH) == (5, "tokens")


def test_a_function_of_the_batch():
    assert Throughput("ones", of=lambda batch: (batch["tokens"] == 1).sum()).count(BATCH) == (1, "ones")


def test_the_rows_of_a_process_stand_for_the_whole_batch():
    assert Throughput("tokens", of="tokens").count(BATCH, 8) == (12, "tokens")
    assert Throughput().count(BATCH, 8) == (24, "tokens")


def test_misfits():
    with pytest.raises(ValueError, match=r"of='labels'.*no such leaf. Its leaves: 'in/mask', 'tokens'"):
        Throughput("tokens", of="labels").count(BATCH)
    with pytest.raises(ValueError, match=r"only the shape of this leaf"):
        Throughput("tokens", of="x").count({"x": jax.ShapeDtypeStruct((2, 3), np.int32)})
    with pytest.raises(ValueError, match=r"unit='a b'.*a word"):
        Throughput("a b")
    with pytest.raises(TypeError, match=r"of=3.*the path of a leaf, or a function"):
        Throughput(of=3)  # pyright: ignore[reportArgumentType]

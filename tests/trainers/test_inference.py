"""The mean over batches, and examples without weight."""

from __future__ import annotations

import numpy as np
import pytest

from jaxpp_flax.trainers.inference import Average
from jaxpp_flax.trainers.step.loss import LossTerms


def test_examples_without_weight_have_no_mean_loss():
    average = Average()
    average.add(LossTerms(total=0.0, weight=0.0, metrics={}), num_microbatches=2, num_examples=8)
    with pytest.raises(ValueError, match="every example of the evaluation has weight 0"):
        average.result()


def test_a_metric_without_weight_is_not_a_number():
    average = Average()
    per_class = (np.array([0.0, 3.0]), np.array([0.0, 4.0]))
    average.add(LossTerms(total=4.0, weight=8.0, metrics={"accuracy": per_class}), num_microbatches=2, num_examples=8)
    found = average.result()
    assert found["loss"] == 0.5
    np.testing.assert_array_equal(found["accuracy"], [np.nan, 0.75])

"""The measured step, where ranks wait for each other; its numbers are in tests/trainers/tuning/test_step_profile.py."""

from __future__ import annotations

import pytest

from jaxpp_flax.engine.runtime.measuring import profile


def test_what_does_not_arrive_is_named_with_what_to_do(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(profile, "_WAIT_SECONDS", 0.01)
    with pytest.raises(TimeoutError, match=r"transfer 7 .* did not arrive within 0 s: .* Measure a smaller batch"):
        profile._Mailbox().await_arrival(7)


def test_the_failure_of_another_rank_is_the_cause():
    mailbox, reason = profile._Mailbox(), ValueError("of the other rank")
    mailbox.fail(reason)
    with pytest.raises(RuntimeError, match=r"another rank failed .* its error is above") as error:
        mailbox.await_arrival(7)
    assert error.value.__cause__ is reason

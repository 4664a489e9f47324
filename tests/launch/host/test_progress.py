"""The page of a process's steps."""

from __future__ import annotations

import os
import resource
import tempfile

import pytest

from jaxpp_flax.launch import LaunchError
from jaxpp_flax.launch.host.progress import Progress


def test_a_new_page_has_room_of_its_own(monkeypatch: pytest.MonkeyPatch):
    # A page without it is read as zeros, and the first write kills the process by SIGBUS if the folder is full then.
    monkeypatch.setattr(tempfile, "tempdir", "/dev/shm")
    page = Progress()
    assert os.fstat(page.descriptor).st_blocks > 0
    page.close()


def test_a_folder_without_room_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tempfile, "tempdir", "/dev/shm")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8, limits[1]))  # as a folder with room for half a page
    try:
        with pytest.raises(
            LaunchError, match=r"no room for the page of a process's steps in /dev/shm: .* let TMPDIR name"
        ):
            Progress()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_steps_that_are_repeated_after_going_back_leave_what_was_reached():
    page = Progress()
    for step in (301, 350, 201):
        page.begin(step)
    assert (page.first, page.last) == (301, 350)
    page.close()

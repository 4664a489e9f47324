"""`jaxpp.distributed_utils`."""

import unittest

import jax
from jax.experimental import multihost_utils

from jaxpp_flax.api.distributed_utils import distributed_main

__all__ = ["JaxDistributedTest", "distributed_main"]


class JaxDistributedTest(unittest.TestCase):
    """A test of several processes, which begin and end each test together; it is skipped in a single process."""

    def setUp(self) -> None:
        super().setUp()
        if jax.process_count() == 1:
            self.skipTest("Test requires multiple processes.")
        multihost_utils.sync_global_devices(f"{self.id()} begins")

    def tearDown(self) -> None:
        multihost_utils.sync_global_devices(f"{self.id()} ends")
        super().tearDown()

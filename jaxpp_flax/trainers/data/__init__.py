"""Batches: where they come from, how they are cut, where a run stands in them."""

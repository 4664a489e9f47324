"""Batches whose microbatches differ in length: how examples are grouped, and in which order microbatches run."""

"""FSDP inside a stage: gather sharded parameters before the loop's tasks, and reduce their gradients after the loop."""

"""Generation: sequences that the pipeline continues token by token, with a cache on the devices of each stage."""

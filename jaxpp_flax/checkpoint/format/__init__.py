"""How a tree of `MpmdArray`s is an ordinary Orbax checkpoint: leaves, paths, digests."""

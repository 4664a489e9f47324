"""The format of a tree of `MpmdArray`s as an ordinary Orbax checkpoint: leaves, paths, files."""

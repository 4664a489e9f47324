"""Why and how a run ends before its data does: asked by a callback, Ctrl-C, or SIGTERM."""

"""The processes of one host: how they are started, what is kept of each, and how they are ended."""

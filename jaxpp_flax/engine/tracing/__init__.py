"""Turn a Python function into graphs: the intermediate representation, markers, `treduce`, canonical forms."""

"""The step that is verified, run both ways: as one plain program and as a pipeline; and what each shows inside."""

"""The programs that tests start as processes are no test modules: without a coordinator they cannot be imported."""

collect_ignore_glob = ["run_*.py"]

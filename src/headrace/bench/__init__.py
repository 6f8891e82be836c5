"""Workloads and measurement, shared by `headrace bench`, `headrace log bench` and benchmarks/."""

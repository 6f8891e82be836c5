"""Workloads and their measuring: what `headrace log bench` and benchmarks/ share."""

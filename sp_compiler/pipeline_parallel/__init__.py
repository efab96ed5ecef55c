"""Pipelines: the cut into stages, their programs and the schedules that run them."""

"""Bytes and time: hardware, one node, memory over a step."""

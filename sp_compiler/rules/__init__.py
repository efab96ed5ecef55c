"""Sharding rules: the placements under which an operator may run."""

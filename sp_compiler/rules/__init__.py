"""Sharding rules: from an operator to the placements under which it may run."""

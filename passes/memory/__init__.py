"""Recomputation: tags by policy or budget, and the partition into forward and backward."""

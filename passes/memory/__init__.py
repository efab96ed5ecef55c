"""What backward recomputes: tags by policy or budget, and the split into forward and backward."""

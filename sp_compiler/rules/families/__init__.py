"""Rows of the rule table, by family of operators."""

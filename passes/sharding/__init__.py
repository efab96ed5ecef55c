"""Placements of all values of a program, and the collectives between them."""

"""Hooks of users: where they run, and what those on blocks see."""

"""The command ``sp-compiler``."""

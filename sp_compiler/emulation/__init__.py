"""Emulation of one rank of a group: the other ranks are not run, and links take virtual time."""

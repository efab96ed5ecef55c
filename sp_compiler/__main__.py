"""``python -m sp_compiler``, the same as the command ``sp-compiler``."""

from __future__ import annotations

from sp_compiler.command_line.app import main

if __name__ == "__main__":
    main()

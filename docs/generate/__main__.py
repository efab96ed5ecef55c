"""Print the generated pages, or write them.

python -m docs.generate [--write]
"""

from __future__ import annotations

import argparse

from docs.generate import api, one_block, tasks, torch_versions

PAGES = {module.PAGE: module.page for module in (one_block, api, torch_versions)} | tasks.PAGES


def main() -> None:
    """Every page, one after another."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="write them to docs/")
    write = parser.parse_args().write
    for path, page in PAGES.items():
        if write:
            path.write_text(page(), encoding="utf-8")
        else:
            print(page())


if __name__ == "__main__":
    main()

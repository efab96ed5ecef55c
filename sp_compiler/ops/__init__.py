"""Custom operators, one file each; every module of this folder is imported here.

A new operator is a new file; there is no list to extend.
"""

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

"""Where things are in the checkout, for every test folder; a module of its own because `conftest` is the name of several."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent
FIXTURES = ROOT / "fixtures"


def load_script(name: str) -> ModuleType:
    """The script `fixtures/<name>.py` as a module."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, FIXTURES / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]

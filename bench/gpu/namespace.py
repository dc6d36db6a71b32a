"""Our `tests` folder under its name, whatever else is installed under it.

A folder without __init__.py loses against any installed package of its name, wherever that stands on the path.
"""

import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]


def own_namespaces() -> None:
    """Make `import tests.…` find this checkout's."""
    module = ModuleType("tests", "The tests of this checkout.")
    module.__path__ = [str(ROOT / "tests")]
    sys.modules["tests"] = module

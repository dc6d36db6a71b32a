"""Real English text for workloads, from what a Debian machine with CPython has: its documentation and licences.

The same interpreter and the same `base-files` package give the same text; workload.py hashes what comes out.
"""

import ast
import re
from pathlib import Path
from runpy import run_path

MIN_CHARS = 300
_STDLIB = Path(ast.__file__).parent
_LICENSES = Path("/usr/share/common-licenses")


def corpus_texts() -> list[str]:
    """Documents in a fixed order, runs of blanks folded: documentation topics, module docstrings, licence texts."""
    topics: dict[str, str] = run_path(str(_STDLIB / "pydoc_data" / "topics.py"))["topics"]
    documents = [topics[name] for name in sorted(topics)]
    documents += [doc for path in sorted(_STDLIB.glob("*.py")) if (doc := _module_docstring(path))]
    documents += [
        path.read_text(encoding="utf-8", errors="replace")
        for path in sorted(_LICENSES.glob("*"))
        if not path.is_symlink()
    ]
    return [re.sub(r"[ \t]+", " ", text).strip() for text in documents if len(text) > MIN_CHARS]


def _module_docstring(path: Path) -> str | None:
    try:
        docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    except (SyntaxError, ValueError):  # a module for another interpreter version is no part of the corpus
        return None
    return docstring if docstring and len(docstring) > MIN_CHARS else None

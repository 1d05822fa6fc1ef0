"""Sphinx configuration. The package must be importable: install it, or put `src` on PYTHONPATH."""

import sys
from importlib.util import find_spec
from pathlib import Path

from dohyo import __version__

sys.path.insert(0, str(Path(__file__).parent))  # for gallery

project = "dohyo"
author = "The dohyo developers"
copyright = "2026, The dohyo developers"
version = release = __version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.mathjax",
    "sphinx.ext.napoleon",
    "gallery",
]
exclude_patterns = ["_build"]

myst_enable_extensions = ["amsmath", "deflist", "dollarmath"]
myst_heading_anchors = 3

# Docstrings write `name` for code, and list a dataclass's fields under "Attributes:".
default_role = "code"
napoleon_use_ivar = True
autodoc_member_order = "bysource"
autodoc_typehints = "signature"

autodoc_mock_imports = ["scvi", "jax"]  # too heavy to be installed for the pages

# The formulas are there without a network: one file of MathJax, with its fonts inside, is copied beside the pages.
mathjax = find_spec("sphinx-mathjax-offline")
if mathjax is None or mathjax.origin is None:
    raise ModuleNotFoundError("the pages need sphinx-mathjax-offline: pip install '.[docs]'")
mathjax_path = "tex-svg.js"

html_theme = "furo"
html_static_path = ["_static", str(Path(mathjax.origin).parent / "static" / "mathjax" / mathjax_path)]
html_css_files = ["wide.css"]
html_title = f"dohyo {version}"

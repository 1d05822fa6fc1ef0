"""Pages from the folders of studies and runs: one file of HTML, and Markdown for README and docs."""

from dohyo.report.entries import Entry
from dohyo.report.folders import find, read
from dohyo.report.page import write_report

__all__ = ["Entry", "find", "read", "write_report"]

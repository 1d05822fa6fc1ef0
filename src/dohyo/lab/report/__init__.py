"""Pages from the folders of studies and runs: one file of HTML, and Markdown for README and docs."""

from dohyo.lab.report.entries import Entry
from dohyo.lab.report.folders import find, read
from dohyo.lab.report.page import write_report

__all__ = ["Entry", "find", "read", "write_report"]

"""`dohyo report`: a page from the folders of studies and runs."""

import json
from pathlib import Path

from jsonargparse import Namespace

from dohyo.errors import DohyoError
from dohyo.lab.cli.parsing import Parser
from dohyo.lab.cli.runs import say

_EXAMPLES = """examples:
  dohyo report out/convergence out/table1 runs/a --out report.html
  dohyo report                                   # every study and run below runs and out
  dohyo report runs/a runs/b --json

The page is one file that loads nothing: send it, print it, read it on a phone.
"""
_PLACES = (Path("runs"), Path("out"))


def report_parser() -> Parser:
    parser = Parser(description="One page of HTML from the folders of studies and runs.", epilog=_EXAMPLES)
    parser.add_argument("runs", type=Path, nargs="*", help="folders of `dohyo reproduce`, `train`, `reverse-kl` or `qpbo`; "
                        "else every one below runs and out")  # fmt: skip
    parser.add_argument("--out", type=Path, default=Path("report.html"), help="the page, a .html file")
    parser.add_json()
    return parser


def report(config: Namespace) -> int:
    from dohyo.lab.report import find, read, write_report

    folders = list(dict.fromkeys(config.runs or find(_PLACES)))
    if not folders:
        raise DohyoError("give the folder of a study or a run: neither runs nor out, below this folder, holds one")
    entries = [read(folder) for folder in folders]
    write_report(entries, config.out)
    if config.json:
        print(json.dumps({"report": str(config.out), "entries": [entry.to_dict() for entry in entries]}))
        return 0
    if not config.runs:
        say(False, f"no folders given: took the {len(entries)} below {' and '.join(str(place) for place in _PLACES)}")
    for entry in entries:
        say(False, f"{entry.folder}: {entry.outcome}, {entry.state}")
    say(False, f"written: {config.out}, {config.out.stat().st_size / 1e6:.1f} MB")
    return 0

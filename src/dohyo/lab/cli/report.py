"""`dohyo report`: a page from the folders of studies and runs."""

import json
from pathlib import Path

from jsonargparse import Namespace

from dohyo.errors import DohyoError
from dohyo.lab.cli.screen import say
from dohyo.lab.parsing import Parser
from dohyo.lab.report import check_page, find, read, write_report

_EXAMPLES = """examples:
  dohyo report out/convergence out/table1 runs/a --out report.html
  dohyo report                                   # every study and run below runs and out
  dohyo report runs/a runs/b --json

The page is one file that loads nothing: send it, print it, read it on a phone.
"""
_PLACES = (Path("runs"), Path("out"))
_RUNS = "folders of `dohyo reproduce`, `train`, `reverse-kl` or `qpbo`; by default every one below runs and out"


def parser() -> Parser:
    made = Parser(description="One page of HTML from the folders of studies and runs.", epilog=_EXAMPLES)
    made.add_argument("runs", type=Path, nargs="*", help=_RUNS)
    made.add_argument("--out", type=Path, default=Path("report.html"), help="the page, a .html file")
    made.add_json()
    return made


def run(options: Namespace) -> int:
    folders = list(dict.fromkeys(options.runs or find(_PLACES)))
    if not folders:
        raise DohyoError("give the folder of a study or a run: neither runs nor out, below this folder, holds one")
    check_page(options.out)
    entries = [read(folder) for folder in folders]
    write_report(entries, options.out)
    if options.json:
        print(json.dumps({"report": str(options.out), "entries": [entry.to_dict() for entry in entries]}))
        return 0
    if not options.runs:
        say(f"no folders given: took the {len(entries)} below {' and '.join(str(place) for place in _PLACES)}")
    for entry in entries:
        say(f"{entry.folder}: {entry.outcome}, {entry.state}")
    say(f"written: {options.out}, {options.out.stat().st_size / 1e6:.1f} MB")
    return 0

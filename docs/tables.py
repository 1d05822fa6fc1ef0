"""Make the tables of results in README.md and the docs anew from results/NAME/study.json.

    python docs/tables.py            # writes them
    python docs/tables.py --check    # says which are not as the results are, and writes nothing

A table stands between `<!-- results:NAME -->` (the conclusions; `<!-- results:NAME TITLE -->` is the table of that title) and
`<!-- end -->`, each on a line of its own.
"""

import sys
from pathlib import Path

from dohyo.files import replacing
from dohyo.report.markdown import filled

ROOT = Path(__file__).resolve().parents[1]


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted(path for path in (ROOT / "docs").rglob("*.md") if "_build" not in path.parts)]


def stale(write: bool = False) -> list[Path]:
    """The pages whose tables are not as the results are."""
    found = []
    for page in pages():
        text = page.read_text(encoding="utf-8")
        made = filled(text, ROOT / "results", page.parent)
        if made != text:
            found.append(page)
            if write:
                with replacing(page) as temporary:
                    temporary.write_text(made, encoding="utf-8")
    return found


if __name__ == "__main__":
    check = sys.argv[1:] == ["--check"]
    if sys.argv[1:] and not check:
        sys.exit("usage: python docs/tables.py [--check]")
    try:
        changed = stale(write=not check)
    except ValueError as error:
        sys.exit(f"tables: {error}")
    for page in changed:
        print(f"{page.relative_to(ROOT)}: {'is not as results/ is; run python docs/tables.py' if check else 'written'}")
    sys.exit(1 if check and changed else 0)

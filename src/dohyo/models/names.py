"""Names that a person typed."""

import difflib
from collections.abc import Iterable


def nearest(name: str, names: Iterable[str]) -> str:
    """What to say to someone who wrote `name`.

    Example:
        >>> nearest("guassian", ["bernoulli", "gaussian"])
        "did you mean 'gaussian'? the names are bernoulli, gaussian"
    """
    names = list(names)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.4)
    return (f"did you mean {near[0]!r}? " if near else "") + f"the names are {', '.join(names) or 'none'}"

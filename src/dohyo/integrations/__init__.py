"""Models of other libraries, one file for each: imported by nobody, and needed only by those who use that library."""

from dohyo.errors import DohyoError


class MissingPackageError(ModuleNotFoundError, DohyoError):
    """The library of an integration is not installed."""


def missing(error: ModuleNotFoundError, extra: str) -> ModuleNotFoundError:
    """What to raise in place of a failed import: one line that names the extra.

    Example:
        >>> raise missing(ModuleNotFoundError(name="pyro"), "pyro")
        Traceback (most recent call last):
            ...
        dohyo.MissingPackageError: dohyo.integrations.pyro needs pyro, which is not installed: pip install 'dohyo[pyro]'
    """
    library = (error.name or "").split(".")[0]
    return MissingPackageError(
        f"dohyo.integrations.{extra} needs {library}, which is not installed: pip install 'dohyo[{extra}]'", name=error.name
    )


MissingPackageError.__module__ = "dohyo"

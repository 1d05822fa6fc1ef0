"""The one type of this package's own errors."""


class DohyoError(ValueError):
    """Something the caller can put right: the message says what came, what is needed and what to write instead."""


DohyoError.__module__ = "dohyo"

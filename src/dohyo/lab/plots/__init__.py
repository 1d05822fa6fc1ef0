"""Pictures. matplotlib's object interface is used throughout: no backend is chosen, no global state changed."""

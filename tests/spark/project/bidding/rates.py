"""Imported only inside a task, long after the code was shipped."""

CENTS_PER_EURO = 100

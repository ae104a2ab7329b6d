"""The one exception that users see: a sentence that says what was found, what was expected and what to do."""


class DartspecError(ValueError):
    """Bad input or an unusable file. One sentence for a person; the command line prints it and exits 2."""

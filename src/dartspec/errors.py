"""The one exception that users see: a sentence that says what was found, what was expected and what to do."""


class DartspecError(ValueError):
    """Bad input or an unusable file. The message is one sentence for a person; the command line prints it and exits 2."""

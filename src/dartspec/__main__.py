"""`python -m dartspec` is the command `dartspec`."""

from dartspec.cli import interrupt


def main() -> None:
    """The entry point."""
    interrupt.listen()
    try:
        from dartspec.cli.main import app

        app(prog_name="dartspec")
    except BaseException as error:  # whatever Ctrl-C became on its way
        if not isinstance(error, KeyboardInterrupt) and not interrupt.asked():
            raise
        interrupt.leave()


if __name__ == "__main__":
    main()

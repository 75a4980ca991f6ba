"""``python -m ds_fgoffload``: the command line, where its script is not on PATH."""

from ds_fgoffload.cli.main import main

if __name__ == "__main__":
    main()

"""`python -m fly_llm.cli` is `fly-llm`."""

from fly_llm.cli.commands import main

if __name__ == "__main__":
    main()

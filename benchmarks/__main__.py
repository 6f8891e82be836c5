"""The command that benchmarks/run starts."""

import sys

from benchmarks.harness import main

if __name__ == "__main__":
    sys.exit(main())

"""`python -m paged_optax`, also installed as `paged-optax`."""

import sys

from paged_optax.cli import main

if __name__ == "__main__":
    sys.exit(main())

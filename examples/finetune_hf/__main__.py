"""`python examples/finetune_hf`: this folder is a package beside the other examples."""

import pathlib
import sys

sys.path[0] = str(pathlib.Path(__file__).absolute().parents[1])

from finetune_hf.command import main  # noqa: E402

sys.exit(main())

"""Train a model on a processed folder: `python train.py FLAGS` is `alphastomics train FLAGS`."""

import sys

from alphastomics.main import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))

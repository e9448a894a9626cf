"""Pictures: AnnData and keys, or a trained model, enter; matplotlib axes leave.

In the manner of scanpy's `pl`: nothing is written into the AnnData, and no figure is shown or
saved here. matplotlib is imported when something is plotted.
"""

from alphastomics.pl.expression import genes
from alphastomics.pl.history import history
from alphastomics.pl.positions import positions, uncertainty
from alphastomics.pl.tissue import tissue, volume

__all__ = ["genes", "history", "positions", "tissue", "uncertainty", "volume"]

"""Pictures: AnnData and keys, or a trained model, enter; matplotlib axes leave.

In the manner of scanpy's `pl`: nothing is written into the AnnData, and no figure is shown or
saved here. matplotlib is imported when something is plotted.
"""

from alphastomics.pl.gene_maps import genes
from alphastomics.pl.loss_curves import history
from alphastomics.pl.position_maps import positions, uncertainty
from alphastomics.pl.tissue_maps import tissue, volume

__all__ = ["genes", "history", "positions", "tissue", "uncertainty", "volume"]

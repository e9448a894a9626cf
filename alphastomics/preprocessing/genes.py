"""Gene names: the lists of files and of the user enter; one common list and alignments leave."""

import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Int64
from scipy.sparse import csr_array

from alphastomics.errors import InputError, counted
from alphastomics.io.files import require_file

logger = logging.getLogger(__name__)

SHOWN = 3  # names shown of a long list in a message


@dataclass(frozen=True)
class Alignment:
    """How a file's columns map onto the gene list.

    Parameters
    ----------
    columns
        Columns of the file that are kept, in the order of the gene list.
    targets
        The index in the gene list of each kept column; rising.
    num_genes
        Length of the gene list.
    """

    columns: Int64[np.ndarray, " K"]
    targets: Int64[np.ndarray, " K"]
    num_genes: int

    def apply(self, values: csr_array) -> csr_array:
        """Drop the genes that are not listed and move the others to their columns."""
        kept = values[:, self.columns]
        kept.sort_indices()
        indices = self.targets[kept.indices].astype(np.int32)
        return csr_array((kept.data, indices, kept.indptr), shape=(kept.shape[0], self.num_genes))

    def missing(self) -> list[int]:
        """List the indices of the gene list that the file did not measure."""
        measured = np.zeros(self.num_genes, dtype=bool)
        measured[self.targets] = True
        return np.flatnonzero(~measured).tolist()


def strangers_among(inputs: Sequence[tuple[Path, Iterable[str]]]) -> list[Path]:
    """List the inputs that share no gene with any other."""
    times = Counter(gene for _, genes in inputs for gene in set(genes))
    return [path for path, genes in inputs if all(times[gene] == 1 for gene in set(genes))]


def read_gene_list(path: Path) -> list[str]:
    """Read one gene per line; blank lines are skipped, repeated genes refused."""
    if not path.exists():
        raise InputError(f"{path}: there is no such gene list: check --gene_list_file")
    require_file(path)
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path}: the gene list is not UTF-8 text: save it as plain text"
        ) from error
    genes = [line.strip() for line in lines if line.strip()]
    if not genes:
        raise InputError(f"{path}: the gene list is empty: write one gene per line")
    require_unique(genes, f"{path}: the gene list", "remove the repetitions")
    return genes


def require_unique(genes: Sequence[str], where: str, remedy: str) -> None:
    """Refuse a list in which a gene stands twice."""
    repeated = repetitions(genes)
    if repeated:
        raise InputError(
            f"{where} has {counted(len(repeated), 'duplicate gene')} (first {shown(repeated)}): "
            f"{remedy}"
        )


def repetitions(names: Iterable[str]) -> list[str]:
    """List the names that occur more than once, in their order."""
    return [name for name, uses in Counter(names).items() if uses > 1]


def shown(names: Sequence[str]) -> str:
    """Show the first few of many names."""
    return ", ".join(repr(name) for name in names[:SHOWN]) + (", …" if len(names) > SHOWN else "")


def hint_at_case(genes: Sequence[str]) -> None:
    """Warn of names that differ in upper and lower case only: most likely one gene."""
    repeated = set(repetitions(name.casefold() for name in genes))
    if repeated:
        spellings = [name for name in genes if name.casefold() in repeated]
        logger.warning(
            "%d gene names differ from another in upper and lower case only (first %s): if they "
            "are the same genes, spell them the same in all files",
            len(spellings),
            shown(sorted(spellings, key=str.casefold)),
        )


def hint_at_unmeasured(panels: Sequence[Sequence[int]], genes: Sequence[str]) -> None:
    """Warn of listed genes that every panel lacks: nothing is learned of them."""
    lacking = sorted(set(panels[0]).intersection(*panels[1:]))
    if lacking:
        logger.warning(
            "%d of the %d listed genes are measured by no input (first %s): nothing is learned of "
            "them, and their generated counts are 0; check their spelling, or take them out of "
            "--gene_list_file",
            *(len(lacking), len(genes), shown([genes[index] for index in lacking])),
        )


def union_of(gene_lists: Iterable[Sequence[str]]) -> list[str]:
    """Return the sorted union."""
    return sorted(set().union(*gene_lists))


def align(file_genes: Sequence[str], listed: Sequence[str], path: Path) -> Alignment:
    """Map a file's genes onto the list; a file that shares none is refused."""
    column = {name: number for number, name in enumerate(file_genes)}
    targets = [index for index, name in enumerate(listed) if name in column]
    if not targets:
        folded = {name.casefold() for name in file_genes}
        same = sum(name.casefold() in folded for name in listed)
        hint = (
            f"{same} agree when upper and lower case are ignored: spell them the same"
            if same
            else "if the file uses Ensembl ids, give the gene list in Ensembl ids too"
        )
        raise InputError(
            f"{path}: none of the {len(listed)} listed genes is in var_names (first listed "
            f"{listed[0]!r}, first found {next(iter(file_genes), None)!r}); {hint}"
        )
    columns = [column[listed[index]] for index in targets]
    return Alignment(np.array(columns), np.array(targets), len(listed))


def require_same_gene_lists(
    first: Sequence[str], second: Sequence[str], first_name: str, name: str
) -> None:
    """Refuse two datasets whose gene lists differ, and show where they part."""
    if list(first) == list(second):
        return
    only = [sorted(set(first) - set(second)), sorted(set(second) - set(first))]
    if only[0] or only[1]:
        differ = f"only in the first: {shown(only[0]) or 'none'}; only in the second: " + (
            shown(only[1]) or "none"
        )
    else:
        index = next(
            i for i, pair in enumerate(zip(first, second, strict=True)) if pair[0] != pair[1]
        )
        differ = f"the order differs from gene {index}: {first[index]!r} and {second[index]!r}"
    raise InputError(
        f"{name}: its gene list ({len(second)} genes) is not that of {first_name} ({len(first)} "
        f"genes); {differ}. Run stage1 on all datasets with the same --gene_list_file"
    )

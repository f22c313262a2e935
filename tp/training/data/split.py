"""Documents that are held out: the model never sees them, nor a copy of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tp.errors import RequestError
from tp.training.data.documents import SEPARATOR, Document
from tp.training.data.order import hashed


def split_documents(
    documents: Sequence[Document], fraction: float, seed: int = 0
) -> tuple[list[Document], list[Document]]:
    """(training part, held-out part), each in the order in which they were given.

    fraction · different documents are held out (rounded, at least one), chosen by a hash of their content and the
    seed, so that it does not matter in which order or in which files they stand. A document that occurs more than once
    is held out once, and its copies are in neither part.

    Raises:
        RequestError: a fraction outside (0, 1), or fewer than two different documents.
    """
    fingerprints = np.array([document.fingerprint() for document in documents], dtype=np.uint64)
    training, held_out = divide(fingerprints, fraction, seed)
    return [documents[index] for index in training], [documents[index] for index in held_out]


def divide(
    fingerprints: npt.NDArray[np.uint64], fraction: float, seed: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Indices of the documents of the two parts, see `split_documents`."""
    if not 0 < fraction < 1:
        raise RequestError(f"the held-out fraction is {fraction}: it must lie between 0 and 1")
    different, first = np.unique(fingerprints, return_index=True)
    if len(different) < 2:
        copies = f", {len(fingerprints)} times" if len(fingerprints) > 1 else ""
        raise RequestError(
            f"the data is one document{copies}: put a line {SEPARATOR} between documents, give more files, or use "
            "--eval-data in place of --eval-fraction"
        )
    count = min(max(round(fraction * len(different)), 1), len(different) - 1)
    chosen = np.argsort(hashed(different, seed), kind="stable")[:count]
    training = np.flatnonzero(~np.isin(fingerprints, different[chosen]))
    return training, np.sort(first[chosen])

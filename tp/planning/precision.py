"""How many bytes numbers take: of activations and cache, and of weights."""

from __future__ import annotations

from dataclasses import dataclass

from tp.dtypes import DTYPES
from tp.errors import ConfigError

SCALE_BYTES = 4
"""Of a row of int8 weights: one float32."""


@dataclass(frozen=True)
class Precision:
    """Bytes of an element.

    Attributes:
        dtype: of activations, norms, biases and cache, by its Hub name.
        itemsize: of one of its elements.
        matrix_itemsize: of an element of a matrix.
        row_scale_bytes: what each row of a matrix takes besides.
    """

    dtype: str
    itemsize: int
    matrix_itemsize: int
    row_scale_bytes: int = 0

    @classmethod
    def of(cls, dtype: str, weights: str = "plain") -> Precision:
        """Of a model in `dtype` whose weights are "plain", or "int8" as `tp.models.prepare_for_inference` makes them.

        Raises:
            ConfigError: an unknown dtype or kind of weights.
        """
        if dtype not in DTYPES:
            raise ConfigError(f"dtype {dtype!r} is not supported: {', '.join(DTYPES)}")
        itemsize = DTYPES[dtype].itemsize
        if weights == "plain":
            return cls(dtype, itemsize, itemsize)
        if weights == "int8":
            return cls(dtype, itemsize, 1, SCALE_BYTES)
        raise ConfigError(f"weights {weights!r} are not supported: plain, int8")

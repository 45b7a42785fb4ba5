"""A stream of tokens: integer arrays, in memory or memory-mapped, that are read as one sequence."""

import bisect
import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from omn_dist.settings import SettingsError

TokenArray = npt.NDArray[np.unsignedinteger]


class TokenStream:
    """Consecutive token arrays as one sequence with random access.

    Args:
        arrays: unsigned integers, each array with one dimension. Memory maps stay on disk until
            they are read.
        names: name of each array in error messages, such as its file.
        vocab_size: all tokens must be smaller; checked when they are read.
    """

    def __init__(self, arrays: Sequence[TokenArray], names: Sequence[str], vocab_size: int) -> None:
        if len(arrays) != len(names):
            raise ValueError(f"found {len(arrays)} arrays with {len(names)} names, expected one name an array")
        self._arrays = tuple(arrays)
        self._names = tuple(names)
        self._ends = tuple(itertools.accumulate(len(array) for array in arrays))
        self.vocab_size = vocab_size

    def __len__(self) -> int:
        """Number of tokens in the stream."""
        return self._ends[-1] if self._ends else 0

    def read(self, start: int, count: int) -> npt.NDArray[np.int64]:
        """Tokens ``start`` .. ``start + count - 1`` as int64.

        Raises:
            IndexError: the range is not within the stream.
            SettingsError: a token is ``vocab_size`` or larger; the message names the array.
        """
        if start < 0 or count < 0 or start + count > len(self):
            raise IndexError(f"tokens {start} .. {start + count} asked of a stream of {len(self)}")
        tokens = np.empty(count, dtype=np.int64)
        filled = 0
        index = bisect.bisect_right(self._ends, start)
        while filled < count:
            array = self._arrays[index]
            offset = start + filled - (self._ends[index] - len(array))
            piece = array[offset : offset + count - filled]
            check_vocabulary(piece, self.vocab_size, self._names[index])
            tokens[filled : filled + len(piece)] = piece
            filled += len(piece)
            index += 1
        return tokens


def check_vocabulary(tokens: TokenArray, vocab_size: int, name: str) -> None:
    """Check that all tokens are smaller than ``vocab_size``.

    Raises:
        SettingsError: one is not; the message names the file ``name``.
    """
    if tokens.size and (largest := int(tokens.max())) >= vocab_size:
        raise SettingsError(
            f"{name}: found token {largest}, expected tokens below the vocabulary size {vocab_size}; the file is "
            "corrupt or was written with another tokenizer"
        )

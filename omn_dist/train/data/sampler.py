"""The order of samples: a function of the seed and the sample's number alone, whatever the number of ranks.

Sample i of a run is one window of ``sequence_length`` tokens and the token after each of them. Windows start at
multiples of ``sequence_length``, so every token but the first, and a rest shorter than a window at the end, is a
target once an epoch; each epoch visits all windows in a fresh pseudo-random order. Step s with a global batch of B
takes samples [s * B, (s + 1) * B); a rank takes its contiguous share. Where a run stands is therefore one integer, the
samples consumed, which is all that a checkpoint must hold, at any world size.
"""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from omn_dist.settings import SettingsError
from omn_dist.train.data.stream import TokenStream

_NUM_ROUNDS = 6


class BatchSource:
    """Random access to the samples of a stream by their number in the run.

    Args:
        stream: the tokens.
        sequence_length: T, tokens of a sample.
        seed: of the order of windows.

    Raises:
        SettingsError: the stream is too short for one window.
    """

    def __init__(self, stream: TokenStream, *, sequence_length: int, seed: int = 0) -> None:
        if sequence_length < 1:
            raise SettingsError(f"data.sequence_length: found {sequence_length}, expected at least 1")
        self.num_windows = (len(stream) - 1) // sequence_length
        """Samples of one epoch."""
        if self.num_windows < 1:
            raise SettingsError(
                f"data.sequence_length: found {sequence_length} for a stream of {len(stream)} tokens, expected a "
                "stream of at least one token more than the sequence length; take more text or a shorter sequence"
            )
        self.sequence_length = sequence_length
        self._stream = stream
        self._seed = seed

    def read(self, first_sample: int, count: int) -> tuple[Tensor, Tensor]:
        """Samples ``first_sample`` .. ``first_sample + count - 1``; the same for every caller, and no state moves.

        Returns:
            tokens and targets, int64 CPU tensors of shape (count, T); a target is the token that follows.
        """
        length = self.sequence_length
        windows = self.window_indices(first_sample, count)
        rows = np.empty((count, length + 1), dtype=np.int64)
        for row, window in zip(rows, windows.tolist(), strict=True):
            row[:] = self._stream.read(window * length, length + 1)
        samples = torch.from_numpy(rows)
        return samples[:, :-1].contiguous(), samples[:, 1:].contiguous()

    def window_indices(self, first_sample: int, count: int) -> npt.NDArray[np.int64]:
        """The windows that samples ``first_sample`` .. ``first_sample + count - 1`` read; int64 of shape (count,)."""
        if first_sample < 0 or count < 0:
            raise ValueError(f"found first_sample {first_sample} and count {count}, expected neither below 0")
        samples = np.arange(first_sample, first_sample + count, dtype=np.int64)
        epochs, positions = np.divmod(samples, self.num_windows)
        windows = np.empty_like(positions)
        for epoch in np.unique(epochs).tolist():
            chosen = epochs == epoch
            windows[chosen] = permute(positions[chosen], self.num_windows, (self._seed, epoch))
        return windows


def rank_share(global_batch: int, rank: int, world_size: int) -> tuple[int, int]:
    """Where the contiguous share of ``rank`` starts within the global batch, and how many samples it has.

    Raises:
        SettingsError: the global batch does not divide by the number of ranks.
    """
    if global_batch < 1 or global_batch % world_size:
        raise SettingsError(
            f"global batch: found {global_batch} sequences for {world_size} ranks, expected a positive multiple of "
            f"{world_size}; change the batch or the number of ranks"
        )
    count = global_batch // world_size
    return rank * count, count


def permute(positions: npt.NDArray[np.int64], size: int, key: tuple[int, ...]) -> npt.NDArray[np.int64]:
    """The images of ``positions`` under a pseudo-random permutation of 0 .. ``size`` - 1 that ``key`` selects.

    A Feistel network on the next even number of bits; what falls outside is sent through again until it falls inside.
    Any element is found without the rest, so an epoch of billions of tokens costs no table and a resumed run no replay.
    """
    half_bits = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half_bits)) - 1)
    round_keys = np.random.SeedSequence(key).generate_state(_NUM_ROUNDS, np.uint64)
    images = positions.astype(np.uint64)
    outside = np.ones(images.shape, dtype=bool)
    while outside.any():
        left, right = images[outside] >> half_bits, images[outside] & mask
        for round_key in round_keys:
            left, right = right, left ^ (_mix(right ^ round_key) & mask)
        images[outside] = (left << half_bits) | right
        outside = images >= size
    return images.astype(np.int64)


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """A bijective scrambling of 64-bit values (the finaliser of splitmix64)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))

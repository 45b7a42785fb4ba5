"""The order of samples. It depends on the seed only, not on the number of ranks.

A sample is a sequence of ``sequence_length`` tokens with the token that follows each of them.
Sequences start at multiples of ``sequence_length``. So in each epoch every token is a target once,
except the first one and a rest at the end that is shorter than a sequence. Each epoch has another
pseudo-random order.

Step s with a global batch of B reads samples [s * B, (s + 1) * B), and each rank a contiguous part
of them. So the position of a run in the data is one integer, the number of samples read. A
checkpoint holds no more than that, and can be loaded on any number of ranks.
"""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from omn_dist.settings import SettingsError
from omn_dist.train.data.stream import TokenStream

_NUM_ROUNDS = 6


class BatchSource:
    """Random access to the samples of a stream, by their number in the run.

    Args:
        stream: the tokens.
        sequence_length: T, the tokens of a sample.
        seed: seed of the order of samples.

    Raises:
        SettingsError: the stream is too short for one sample.
    """

    def __init__(self, stream: TokenStream, *, sequence_length: int, seed: int = 0) -> None:
        if sequence_length < 1:
            raise SettingsError(f"data.sequence_length: found {sequence_length}, expected at least 1")
        self.num_sequences = (len(stream) - 1) // sequence_length
        """Sequences in the stream, which are the samples of one epoch."""
        if self.num_sequences < 1:
            raise SettingsError(
                f"data.sequence_length: found {sequence_length} for a stream of {len(stream)} tokens, expected a "
                "stream of at least one token more than the sequence length; take more text or a shorter sequence"
            )
        self.sequence_length = sequence_length
        self._stream = stream
        self._seed = seed

    def read(self, first_sample: int, count: int) -> tuple[Tensor, Tensor]:
        """Samples ``first_sample`` .. ``first_sample + count - 1``. Reading changes no state.

        Returns:
            Tokens and targets, int64 CPU tensors of shape (count, T). The target of a token is the
            token that follows it.
        """
        length = self.sequence_length
        sequences = self.sequence_indices(first_sample, count)
        rows = np.empty((count, length + 1), dtype=np.int64)
        for row, sequence in zip(rows, sequences.tolist(), strict=True):
            row[:] = self._stream.read(sequence * length, length + 1)
        samples = torch.from_numpy(rows)
        return samples[:, :-1].contiguous(), samples[:, 1:].contiguous()

    def sequence_indices(self, first_sample: int, count: int) -> npt.NDArray[np.int64]:
        """The sequences of the stream that samples read: their positions divided by T.

        Returns:
            int64 of shape (count,), for samples ``first_sample`` .. ``first_sample + count - 1``.
        """
        if first_sample < 0 or count < 0:
            raise ValueError(f"found first_sample {first_sample} and count {count}, expected neither below 0")
        samples = np.arange(first_sample, first_sample + count, dtype=np.int64)
        epochs, positions = np.divmod(samples, self.num_sequences)
        sequences = np.empty_like(positions)
        for epoch in np.unique(epochs).tolist():
            chosen = epochs == epoch
            sequences[chosen] = permute(positions[chosen], self.num_sequences, (self._seed, epoch))
        return sequences


def rank_share(global_batch: int, rank: int, world_size: int) -> tuple[int, int]:
    """First sample and number of samples of ``rank`` within a global batch.

    Raises:
        SettingsError: the global batch is no multiple of the number of ranks.
    """
    if global_batch < 1 or global_batch % world_size:
        raise SettingsError(
            f"global batch: found {global_batch} sequences for {world_size} ranks, expected a positive multiple of "
            f"{world_size}; change the batch or the number of ranks"
        )
    count = global_batch // world_size
    return rank * count, count


def permute(positions: npt.NDArray[np.int64], size: int, key: tuple[int, ...]) -> npt.NDArray[np.int64]:
    """The images of ``positions`` under a pseudo-random permutation of 0 .. ``size`` - 1.

    The permutation is chosen by ``key``. It is a Feistel network on an even number of bits that is
    large enough; an image of ``size`` or more goes through the network again until it is smaller.
    Each image is computed alone: no table of the epoch is needed, and a resumed run reads nothing
    twice.
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
    """A bijection that mixes the bits of 64-bit values: the finaliser of splitmix64."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))

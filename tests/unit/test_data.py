"""Corpus, shards, preparation, and the order of samples."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from omn_dist.settings import SettingsError
from omn_dist.train.data import BatchSource, DataConfig, TokenStream, open_data, open_tokenizer, prepare_text, rank_share
from omn_dist.train.data.corpus import stdlib_files, stdlib_streams
from omn_dist.train.data.sampler import permute
from omn_dist.train.data.shards import ShardFolder, ShardWriter, open_shards
from omn_dist.train.data.split import split_by_file


def counting_stream(num_tokens: int, num_arrays: int = 1) -> TokenStream:
    """Token i is i, so that a token shows where it was read."""
    arrays = np.array_split(np.arange(num_tokens, dtype=np.uint32), num_arrays)
    return TokenStream(arrays, [f"array {i}" for i in range(num_arrays)], num_tokens)


def documents(tokens: np.ndarray) -> list[bytes]:
    """The texts of a byte stream whose documents each end in token 256."""
    ends = np.flatnonzero(tokens == 256)
    assert ends[-1] == len(tokens) - 1
    return [part[part != 256].astype(np.uint8).tobytes() for part in np.split(tokens, ends[:-1] + 1)]


# --- the stream -----------------------------------------------------------------------------------


@given(st.data())
def test_a_stream_of_several_arrays_reads_like_one(data: st.DataObject) -> None:
    num_tokens = data.draw(st.integers(1, 60))
    # More arrays than tokens leave some of them empty.
    stream = counting_stream(num_tokens, data.draw(st.integers(1, 80)))
    start = data.draw(st.integers(0, num_tokens))
    count = data.draw(st.integers(0, num_tokens - start))
    tokens = stream.read(start, count)
    assert tokens.dtype == np.int64
    assert tokens.tolist() == list(range(start, start + count))


@pytest.mark.parametrize(("start", "count"), [(-1, 2), (9, 2), (11, 0), (0, -1)])
def test_a_read_outside_of_the_stream_is_refused(start: int, count: int) -> None:
    with pytest.raises(IndexError, match="of a stream of 10"):
        counting_stream(10).read(start, count)


# --- the order ------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.integers(1, 5000), st.integers(0, 2**40), st.integers(0, 1000))
def test_an_epoch_is_a_permutation(size: int, seed: int, epoch: int) -> None:
    images = permute(np.arange(size), size, (seed, epoch))
    assert sorted(images.tolist()) == list(range(size))


def test_the_permutation_is_the_same_on_every_machine() -> None:
    """If these values change, every resumed run reads its data in another order."""
    assert permute(np.arange(8), 8, (0, 0)).tolist() == [0, 5, 3, 7, 6, 1, 2, 4]
    assert permute(np.arange(3), 10**12, (3, 4)).tolist() == [521756782538, 380613885347, 325476524840]


def test_the_permutation_looks_random() -> None:
    size = 4001
    images = permute(np.arange(size), size, (1, 0))
    # Of a uniform permutation each has mean 0 and standard deviation 1 / sqrt(size) = 0.016.
    for lag in (1, 2, 64):
        assert abs(np.corrcoef(images[:-lag], images[lag:])[0, 1]) < 0.08
    assert abs(np.corrcoef(np.arange(size), images)[0, 1]) < 0.08
    assert (images == np.arange(size)).sum() < 8


def test_samples_are_sequences_with_the_next_token_as_target() -> None:
    source = BatchSource(counting_stream(101), sequence_length=10, seed=3)
    tokens, targets = source.read(0, source.num_sequences)
    assert source.num_sequences == 10
    assert tokens.dtype == targets.dtype == torch.int64
    assert tokens.is_contiguous()
    assert targets.is_contiguous()
    assert torch.equal(targets, tokens + 1)
    assert torch.equal(tokens, tokens[:, :1] + torch.arange(10))
    # Every token but the first is a target once.
    assert targets.flatten().sort().values.tolist() == list(range(1, 101))


def test_epochs_cover_all_sequences_in_different_orders() -> None:
    source = BatchSource(counting_stream(501), sequence_length=10, seed=3)
    epochs = [source.sequence_indices(epoch * 50, 50).tolist() for epoch in range(3)]
    assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert source.sequence_indices(40, 70).tolist() == epochs[0][40:] + epochs[1] + epochs[2][:10]


def test_the_order_depends_on_the_seed() -> None:
    stream = counting_stream(501)
    one, two = (BatchSource(stream, sequence_length=10, seed=seed).sequence_indices(0, 50) for seed in (0, 1))
    assert one.tolist() != two.tolist()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 6, 12])
def test_shares_of_all_ranks_in_turn_are_the_global_batches(world_size: int) -> None:
    global_batch, num_steps = 12, 5
    # 40 sequences: the steps go past the end of an epoch.
    source = BatchSource(counting_stream(401), sequence_length=10, seed=0)
    expected, _ = source.read(0, global_batch * num_steps)
    parts = []
    for step in range(num_steps):
        for rank in range(world_size):
            first, count = rank_share(global_batch, rank, world_size)
            # As another process would build it.
            own = BatchSource(counting_stream(401, 7), sequence_length=10, seed=0)
            parts.append(own.read(step * global_batch + first, count)[0])
    assert torch.equal(torch.cat(parts), expected)


@pytest.mark.parametrize(("global_batch", "world_size"), [(10, 4), (2, 3), (0, 1)])
def test_a_batch_that_does_not_divide_is_refused(global_batch: int, world_size: int) -> None:
    with pytest.raises(SettingsError, match=f"found {global_batch} sequences for {world_size} ranks"):
        rank_share(global_batch, 0, world_size)


def test_reading_on_from_a_position_equals_reading_through() -> None:
    source = BatchSource(counting_stream(1001), sequence_length=7, seed=5)
    whole, _ = source.read(0, 300)
    assert torch.equal(BatchSource(counting_stream(1001), sequence_length=7, seed=5).read(137, 163)[0], whole[137:])


def test_a_stream_shorter_than_a_sample_is_refused() -> None:
    BatchSource(counting_stream(11), sequence_length=10)
    with pytest.raises(SettingsError, match="found 10 for a stream of 10 tokens"):
        BatchSource(counting_stream(10), sequence_length=10)


# --- the default corpus ---------------------------------------------------------------------------


def test_the_standard_library_gives_megabytes_split_by_file() -> None:
    files = stdlib_files()
    train, validation = stdlib_streams()
    assert 8e6 < sum(map(len, files.values())) < 20e6
    assert list(files) == sorted(files)
    assert "os.py" in files
    assert not [name for name in files if "site-packages" in name or "/test/" in f"/{name}" or "/tests/" in name]
    train_texts, validation_texts = (documents(s.read(0, len(s))) for s in (train, validation))
    assert len(train_texts) + len(validation_texts) == len(files)
    # No byte is lost, and no text is in both streams.
    assert sorted(train_texts + validation_texts) == sorted(files.values())
    assert 0.04 < len(validation) / (len(train) + len(validation)) < 0.1
    assert train.vocab_size == validation.vocab_size == 257


def test_a_library_without_sources_is_refused(tmp_path: Path) -> None:
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "other.py").write_text("x = 1\n")
    (tmp_path / "empty.py").touch()
    with pytest.raises(SettingsError, match=r"found no \.py file in the standard library folder"):
        stdlib_files(tmp_path)


def test_the_split_is_stable_and_follows_the_bytes() -> None:
    sizes = {f"file {i}": 100 + i for i in range(200)}
    train, validation = split_by_file(sizes, 0.1, 0)
    assert sorted(train + validation) == sorted(sizes)
    assert 0.09 < sum(sizes[name] for name in validation) / sum(sizes.values()) < 0.12
    assert split_by_file(dict(reversed(sizes.items())), 0.1, 0) == (train, validation)
    assert split_by_file(sizes, 0.1, 1) != (train, validation)
    assert [len(side) for side in split_by_file({"large": 10**9, "small": 1}, 0.5, 0)] == [1, 1]
    with pytest.raises(SettingsError, match="found 1, expected at least 2"):
        split_by_file({"only": 5}, 0.1, 0)


# --- shards ---------------------------------------------------------------------------------------


def write_folder(folder: Path, **changes: Any) -> tuple[np.ndarray, np.ndarray]:
    """A small valid folder of shards; returns its training and validation tokens."""
    options = {"dtype": "uint16", "shard_format": "bin", "shard_tokens": 40, "vocab_size": 300} | changes
    generator = np.random.default_rng(0)
    sides = {side: generator.integers(0, options["vocab_size"], n) for side, n in (("train", 100), ("validation", 30))}
    files = {}
    for side, tokens in sides.items():
        writer = ShardWriter(
            folder,
            side,
            dtype=options["dtype"],
            shard_format=options["shard_format"],
            shard_tokens=options["shard_tokens"],
        )
        for piece in np.array_split(tokens.astype(options["dtype"]), 7):
            writer.append(piece)
        writer.finish()
        files[side] = tuple(writer.files)
    meta = ShardFolder(format=1, tokenizer="byte", vocab_size=options["vocab_size"], dtype=options["dtype"], **files)
    (folder / "meta.json").write_text(json.dumps(dataclasses.asdict(meta)))
    return sides["train"], sides["validation"]


@pytest.mark.parametrize("shard_format", ["bin", "npy"])
@pytest.mark.parametrize(("dtype", "vocab_size"), [("uint16", 1 << 16), ("uint32", 1 << 20)])
def test_shards_return_what_was_written(tmp_path: Path, shard_format: str, dtype: str, vocab_size: int) -> None:
    train_tokens, validation_tokens = write_folder(tmp_path, dtype=dtype, shard_format=shard_format, vocab_size=vocab_size)
    meta, train, validation = open_shards(tmp_path)
    assert [shard.num_tokens for shard in meta.train] == [40, 40, 20]
    assert train.read(0, len(train)).tolist() == train_tokens.tolist()
    assert validation.read(0, len(validation)).tolist() == validation_tokens.tolist()
    data = open_data(DataConfig(source="shards", path=str(tmp_path), sequence_length=10))
    assert (data.num_tokens, data.vocab_size) == (100, vocab_size)


def edit_meta(**changes: Any) -> Callable[[Path], object]:
    def edit(folder: Path) -> None:
        path = folder / "meta.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return edit


def cut(name: str, size: int) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:size])


@pytest.mark.parametrize(
    ("shard_format", "damage", "message"),
    [
        ("bin", lambda folder: (folder / "train-00001.bin").unlink(), "train-00001.bin: missing, expected a shard of 40"),
        ("bin", cut("train-00001.bin", 79), "train-00001.bin: found 79 bytes, expected 80 (40 tokens of uint16)"),
        ("bin", cut("train-00001.bin", 0), "train-00001.bin: found 0 bytes, expected 80"),
        ("bin", edit_meta(vocab_size=200), "expected tokens below the vocabulary size 200"),
        ("bin", edit_meta(vocab_size=70_000), "found vocab_size 70000, expected what fits in uint16"),
        ("bin", edit_meta(dtype="uint8"), "meta.json.dtype: unknown choice 'uint8'"),
        ("bin", edit_meta(format=2), "found format 2, expected 1"),
        ("bin", edit_meta(validation=[]), "found no validation shards, expected at least one"),
        ("bin", edit_meta(trian=[]), "meta.json.trian'; did you mean"),
        ("bin", edit_meta(train=[{"name": "meta.json", "num_tokens": 3}]), "found suffix '.json', expected bin or npy"),
        ("bin", edit_meta(train=[{"name": "train-00000.bin", "num_tokens": 0}]), "gives it 0 tokens"),
        ("bin", lambda folder: (folder / "meta.json").unlink(), "found no meta.json in"),
        ("bin", lambda folder: (folder / "meta.json").write_text("{"), "meta.json: not readable as JSON"),
        ("npy", cut("train-00001.npy", 150), "train-00001.npy: not readable as .npy"),
        ("npy", cut("train-00001.npy", 0), "train-00001.npy: not readable as .npy"),
        ("npy", edit_meta(dtype="uint32"), "found uint16 of shape (40,), expected uint32 of shape (40,)"),
    ],
)
def test_a_damaged_folder_is_one_clear_line(
    tmp_path: Path, shard_format: str, damage: Callable[[Path], object], message: str
) -> None:
    write_folder(tmp_path, shard_format=shard_format)
    damage(tmp_path)
    with pytest.raises(SettingsError) as caught:
        open_data(DataConfig(source="shards", path=str(tmp_path), sequence_length=10))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("position", [0, 39])
def test_opening_a_large_shard_checks_both_of_its_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, position: int) -> None:
    monkeypatch.setattr("omn_dist.train.data.shards._NUM_CHECKED", 5)
    write_folder(tmp_path)
    np.memmap(tmp_path / "train-00001.bin", dtype="<u2", mode="r+")[position] = 300
    with pytest.raises(SettingsError, match=r"train-00001\.bin: found token 300"):
        open_shards(tmp_path)


def test_a_wrong_token_that_opening_does_not_reach_is_found_when_it_is_read() -> None:
    tokens = np.zeros(100, dtype=np.uint16)
    tokens[50] = 300
    stream = TokenStream([tokens], ["some.bin"], 257)
    assert stream.read(0, 50).sum() == 0
    with pytest.raises(SettingsError, match=r"some\.bin: found token 300, expected tokens below the vocabulary size 257"):
        stream.read(40, 20)


@pytest.mark.parametrize(
    ("settings_given", "message"),
    [
        ({"source": "shards"}, "data.path: missing"),
        ({"source": "shards", "path": "no/such/folder"}, "data.path: found no folder no/such/folder"),
        ({"source": "stdlib", "path": "folder"}, "data.path: found 'folder' with source 'stdlib'"),
        ({"sequence_length": 0}, "data.sequence_length: found 0"),
        ({"seed": -1}, "data.seed: found -1"),
    ],
)
def test_impossible_data_settings_are_refused(settings_given: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        open_data(DataConfig(**({"sequence_length": 8} | settings_given)))


# --- preparation ----------------------------------------------------------------------------------


def write_texts(folder: Path, num_files: int = 6) -> dict[str, bytes]:
    folder.mkdir()
    text_by_name = {f"text_{i}.txt": f"Text {i} é.\n".encode() * (20 + i) for i in range(num_files)}
    for name, text in text_by_name.items():
        (folder / name).write_bytes(text)
    (folder / "empty.txt").touch()
    (folder / ".hidden").write_text("not text")
    return text_by_name


@pytest.mark.parametrize("shard_format", ["bin", "npy"])
def test_prepared_bytes_come_back_as_they_were(tmp_path: Path, shard_format: Any) -> None:
    text_by_name = write_texts(tmp_path / "texts")
    meta = prepare_text(
        [tmp_path / "texts"],
        tmp_path / "out",
        shard_tokens=500,
        validation_fraction=0.2,
        shard_format=shard_format,
        progress=False,
    )
    data = open_data(DataConfig(source="shards", path=str(tmp_path / "out"), sequence_length=8))
    train, validation = (documents(s.read(0, len(s))) for s in (data.train, data.validation))
    assert sorted(train + validation) == sorted(text_by_name.values())
    assert validation
    assert (meta.vocab_size, meta.dtype, len(meta.train) > 1) == (257, "uint16", True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "texts"]


def test_one_file_is_cut_after_a_line_for_validation(tmp_path: Path) -> None:
    text = b"".join(b"line %d\n" % i for i in range(1000))
    (tmp_path / "one.txt").write_bytes(text)
    prepare_text([tmp_path / "one.txt"], tmp_path / "out", validation_fraction=0.1, progress=False)
    _, train, validation = open_shards(tmp_path / "out")
    (train_text,), (validation_text,) = (documents(s.read(0, len(s))) for s in (train, validation))
    assert train_text + validation_text == text
    assert train_text.endswith(b"\n")
    assert 0.09 < len(validation_text) / len(text) < 0.11


def test_pieces_of_a_large_document_join_to_its_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("omn_dist.train.data.preparation._PIECE_BYTES", 10)
    text_by_name = write_texts(tmp_path / "texts", num_files=3)
    (tmp_path / "texts" / "no_lines.txt").write_bytes(b"x" * 57)
    prepare_text([tmp_path / "texts"], tmp_path / "out", progress=False)
    _, train, validation = open_shards(tmp_path / "out")
    found = [text for s in (train, validation) for text in documents(s.read(0, len(s)))]
    assert sorted(found) == sorted([*text_by_name.values(), b"x" * 57])


def write_tokenizer(path: Path, texts: list[str], special: str = "<|endoftext|>") -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=[special],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(path))


def test_prepare_with_a_tokenizer_file(tmp_path: Path) -> None:
    text_by_name = write_texts(tmp_path / "texts")
    texts = [text.decode() for text in text_by_name.values()]
    write_tokenizer(tmp_path / "tokenizer.json", texts)
    meta = prepare_text([tmp_path / "texts"], tmp_path / "out", open_tokenizer(str(tmp_path / "tokenizer.json")), progress=False)
    _, train, validation = open_shards(tmp_path / "out")
    tokenizer = pytest.importorskip("tokenizers").Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert meta.vocab_size == tokenizer.get_vocab_size()
    decoded = [
        text
        for stream in (train, validation)
        for text in tokenizer.decode(stream.read(0, len(stream)), skip_special_tokens=False).split("<|endoftext|>")
    ]
    assert sorted(text for text in decoded if text) == sorted(texts)
    # Bytes are merged into fewer tokens.
    assert len(train) + len(validation) < sum(map(len, texts))


def test_a_tokenizer_file_must_say_how_documents_end(tmp_path: Path) -> None:
    text_by_name = write_texts(tmp_path / "texts")
    path = tmp_path / "tokenizer.json"
    write_tokenizer(path, [text.decode() for text in text_by_name.values()], special="<over>")
    with pytest.raises(SettingsError, match="has none of the end-of-document tokens"):
        open_tokenizer(str(path))
    prepare_text([tmp_path / "texts"], tmp_path / "out", open_tokenizer(str(path), "<over>"), progress=False)
    assert (tmp_path / "out" / "meta.json").is_file()


def test_prepare_refuses_an_output_that_exists(tmp_path: Path) -> None:
    write_texts(tmp_path / "texts")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_text("data")
    with pytest.raises(SettingsError, match="exists already and is not overwritten"):
        prepare_text([tmp_path / "texts"], tmp_path / "out", progress=False)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["precious"]


def test_a_failure_while_writing_leaves_nothing(tmp_path: Path) -> None:
    text_by_name = write_texts(tmp_path / "texts")
    write_tokenizer(tmp_path / "tokenizer.json", [text.decode() for text in text_by_name.values()])
    (tmp_path / "texts" / "text_9.txt").write_bytes(b"latin \xe9\n")
    with pytest.raises(SettingsError, match=r"text_9\.txt: text: .* at byte 6, expected UTF-8"):
        prepare_text([tmp_path / "texts"], tmp_path / "out", open_tokenizer(str(tmp_path / "tokenizer.json")), progress=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["texts", "tokenizer.json"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"paths": ["no/such.txt"]}, "text: found no file or folder no/such.txt"),
        ({"paths": []}, "text: found no non-empty file"),
        ({"tokenizer": "no/tokenizer.json"}, "tokenizer: found no file no/tokenizer.json"),
        ({"tokenizer": __file__}, "is not a tokenizer.json"),
        ({"validation_fraction": 0.0}, "validation_fraction: found 0.0"),
        ({"validation_fraction": 1.5}, "validation_fraction: found 1.5"),
        ({"shard_tokens": 0}, "shard_tokens: found 0"),
    ],
)
def test_prepare_refuses_what_cannot_work(tmp_path: Path, arguments: dict[str, Any], message: str) -> None:
    write_texts(tmp_path / "texts")
    given = {"paths": [tmp_path / "texts"], "out_folder": tmp_path / "out", "tokenizer": "byte", "progress": False} | arguments
    with pytest.raises(SettingsError) as caught:
        prepare_text(**(given | {"tokenizer": open_tokenizer(given["tokenizer"])}))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()

"""Numbers, layout and life cycle of trace files, without any model."""

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hae import trace

ORIGIN = trace.Origin(recorder="test 0", libraries="numpy 0", command="test")
DOUBLES_THAT_HDF5_ROUNDS_WRONGLY = {0.124999993: 0.125, 1.5249285751529568e-05: 1.52587890625e-05}


def info(name="a", tokens=3, **changes):
    options = dict(
        name=name,
        group=name,
        payload="qkv",
        layers=1,
        query_heads=2,
        kv_heads=1,
        head_dim=4,
        prompt=tokens,
        generated=1,
        scale=0.5,
        model="m",
        attention_implementation="eager",
        modality=np.zeros(tokens),
        image=np.full(tokens, -1),
        patch=None,
        token_id=np.arange(tokens),
        token=["ä"] * tokens,
        window=np.zeros(1),
    )
    return trace.SequenceInfo(**(options | changes))


def write(path, name="a", values=None, dtype="float32"):
    values = np.zeros((2, 3, 4), np.float32) if values is None else values
    with trace.new_trace(path, ORIGIN) as file:
        group = trace.create_sequence(file, 0, info(name))
        dataset = trace.create_numbers(group.create_group("layers/000000"), "q", (2, 3, 4), dtype)
        for head in range(2):
            trace.write_numbers(dataset, head, trace.encoded(values[head], dtype))
    return path


# ---------------------------------------------------------------------------------- numbers


def test_the_code_0x3f80_is_one_as_bfloat16():
    # Sign 0, exponent 127 (bias 127), mantissa 0.
    assert trace.bfloat16_values(np.array([0x3F80, 0x3C00])).tolist() == [1.0, 0.0078125]


def test_bfloat16_rounds_ties_to_even():
    # One unit of bfloat16 at 1 is 2**-7: 1 + 2**-8 lies halfway to the odd code, 1 + 3*2**-8
    # halfway above it.
    values = np.array([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20], np.float32)
    assert trace.bfloat16_codes(values).tolist() == [0x3F80, 0x3F82, 0x3F81]


@given(st.floats(width=32, allow_nan=False))
def test_bfloat16_takes_the_nearest_of_the_two_neighbours(value):
    value = np.float32(value)
    found = trace.bfloat16_values(trace.bfloat16_codes(value[None]))[0]
    bits = value[None].view(np.uint32)
    below = (bits & 0xFFFF0000).view(np.float32)[0]
    above = ((bits & 0xFFFF0000) + np.uint32(0x10000)).view(np.float32)[0]
    if not np.isfinite(value) or not np.isfinite(above):
        assert found in (below, above)
        return
    distances = abs(float(value) - float(below)), abs(float(above) - float(value))
    assert abs(float(found) - float(value)) == min(distances)


@pytest.mark.parametrize(("value", "half"), DOUBLES_THAT_HDF5_ROUNDS_WRONGLY.items())
def test_a_half_that_carries_into_the_exponent_is_written_right(tmp_path, value, half):
    values = np.full((2, 3, 4), value, np.float32)
    path = write(tmp_path / "t.h5", values=values, dtype="float16")
    with trace.open_trace(path) as file:
        stored = file["sequences/000000/layers/000000/q"]
        assert stored.dtype == np.float16
        assert (stored[()] == half).all()


@pytest.mark.parametrize("dtype", trace.DTYPES)
def test_numbers_come_back_as_they_were_rounded(tmp_path, dtype):
    values = np.random.default_rng(1).normal(size=(2, 3, 4)).astype(np.float32)
    path = write(tmp_path / "t.h5", values=values, dtype=dtype)
    codes = trace.encoded(values, dtype)
    expected = trace.bfloat16_values(codes) if dtype == "bfloat16" else codes.astype(np.float32)
    with trace.open_trace(path) as file:
        dataset = file["sequences/000000/layers/000000/q"]
        assert dataset.id.get_storage_size() == 24 * trace.element_bytes(dtype)
        assert (trace.read_numbers(dataset) == expected).all()


def test_a_bfloat16_dataset_declares_its_fields(tmp_path):
    path = write(tmp_path / "t.h5", dtype="bfloat16")
    with h5py.File(path) as file:
        kind = file["sequences/000000/layers/000000/q"].id.get_type()
        assert (kind.get_fields(), kind.get_ebias()) == ((15, 7, 8, 0, 7), 127)


def test_an_unknown_16_bit_float_is_refused(tmp_path):
    kind = h5py.h5t.IEEE_F16LE.copy()
    kind.set_fields(15, 7, 8, 0, 7)  # bfloat16's fields with the bias of a half
    with h5py.File(tmp_path / "t.h5", "w") as file:
        h5py.h5d.create(file.id, b"x", kind, h5py.h5s.create_simple((2,)))
        with pytest.raises(trace.TraceError, match="unknown 16-bit float type"):
            trace.read_numbers(file["x"])


@pytest.mark.parametrize(
    ("value", "dtype"), [(65520.0, "float16"), (3.4e38, "bfloat16"), (np.nan, "float32")]
)
def test_a_number_that_does_not_stay_finite_is_refused(value, dtype):
    with pytest.raises(trace.TraceError):
        trace.encoded(np.array([1.0, value]), dtype)


# ----------------------------------------------------------------------------------- layout


def test_payload_datasets_are_contiguous_and_large_ones_aligned(tmp_path):
    with trace.new_trace(tmp_path / "t.h5", ORIGIN) as file:
        group = trace.create_sequence(file, 0, info())
        dataset = trace.create_numbers(group, "layers", (2, 300, 4), "float32")
        for head in range(2):
            trace.write_numbers(dataset, head, np.zeros((300, 4), np.float32))
        assert dataset.get_create_plist().get_layout() == h5py.h5d.CONTIGUOUS
        assert dataset.get_offset() % 64 == 0


def test_token_text_is_utf8_of_fixed_length(tmp_path):
    with h5py.File(write(tmp_path / "t.h5")) as file:
        tokens = file["sequences/000000/token"]
        assert h5py.check_string_dtype(tokens.dtype) == ("utf-8", 2)
        assert tokens.asstr()[0] == "ä"


def test_a_sequence_without_text_or_pictures_is_written(tmp_path):
    only_pictures = info(modality=np.ones(3), image=np.zeros(3), token=[""] * 3)
    with trace.new_trace(tmp_path / "t.h5", ORIGIN) as file:
        trace.create_sequence(file, 0, only_pictures)
    with trace.open_trace(tmp_path / "t.h5") as file:
        assert file["sequences/000000/modality"][()].tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query_heads": 6, "kv_heads": 4}, "6 query heads do not divide by 4 KV heads"),
        ({"image": np.zeros(3)}, "-1 exactly for text"),
        ({"token_id": np.arange(2)}, "token_id has 2 entries, expected 3"),
        ({"prompt": 4}, "4 prompt tokens of 3 tokens"),
    ],
)
def test_parts_that_do_not_fit_together_are_refused(changes, message):
    with pytest.raises(trace.TraceError, match=message):
        info(**changes)


def test_a_window_of_four_shows_a_query_itself_and_three_before():
    assert np.flatnonzero(trace.visible(10, window=4)[9]).tolist() == [6, 7, 8, 9]
    assert np.flatnonzero(trace.visible(10, window=0)[3]).tolist() == [0, 1, 2, 3]


# ------------------------------------------------------------------------------- life cycle


def test_a_writer_that_fails_leaves_nothing(tmp_path):
    with (
        pytest.raises(RuntimeError, match="stop"),
        trace.new_trace(tmp_path / "t.h5", ORIGIN) as file,
    ):
        trace.create_sequence(file, 0, info())
        raise RuntimeError("stop")
    assert list(tmp_path.iterdir()) == []


def test_an_existing_file_survives_a_writer_that_fails(tmp_path):
    path = write(tmp_path / "t.h5", name="old")
    with pytest.raises(RuntimeError), trace.new_trace(path, ORIGIN):
        raise RuntimeError
    with trace.open_trace(path) as file:
        assert file["sequences/000000"].attrs["name"] == "old"


def test_a_file_that_is_not_complete_is_refused(tmp_path):
    path = write(tmp_path / "t.h5")
    with h5py.File(path, "r+") as file:
        del file.attrs["complete"]
    with pytest.raises(trace.TraceError, match="incomplete"), trace.open_trace(path):
        pass


def test_a_truncated_file_is_refused_in_one_line(tmp_path):
    path = write(tmp_path / "t.h5")
    path.write_bytes(path.read_bytes()[:96])
    with pytest.raises(trace.TraceError, match="cannot be opened"), trace.open_trace(path):
        pass


@pytest.mark.parametrize("dtype", trace.DTYPES)
def test_joining_keeps_order_types_and_numbers(tmp_path, dtype):
    values = np.random.default_rng(2).normal(size=(2, 3, 4)).astype(np.float32)
    parts = [write(tmp_path / f"{n}.h5", n, values * i, dtype) for i, n in enumerate("xy")]
    trace.join_traces(parts, tmp_path / "all.h5", ORIGIN)
    with trace.open_trace(tmp_path / "all.h5") as file:
        assert [group.attrs["name"] for group in file["sequences"].values()] == ["x", "y"]
        dataset = file["sequences/000001/layers/000000/q"]
        assert dataset.id.get_create_plist().get_layout() == h5py.h5d.CONTIGUOUS
        with trace.open_trace(parts[1]) as part:
            original = part["sequences/000000/layers/000000/q"]
            assert (trace.read_numbers(dataset) == trace.read_numbers(original)).all()

# SPDX-License-Identifier: Apache-2.0
"""Tensors of the libraries that a worker uses: what they are, and copies of their parts.

numpy and torch have the same few operations under other names; a worker may lack either.
"""

import importlib
import math
import sys
import warnings
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple


class Run(NamedTuple):
    """Where a tensor is in this process's memory."""

    device: str  # "cpu" or "cuda:0"
    address: int  # of its first element
    strides: tuple[int, ...]  # in bytes


class NumpyLibrary:
    """Operations on numpy arrays."""

    def __init__(self) -> None:
        self._numpy = importlib.import_module("numpy")

    def dtype(self, name: str) -> Any:
        """Return the dtype of this name; TypeError if there is none."""
        return self._numpy.dtype(name)

    def empty(self, sizes: Sequence[int], dtype: str) -> Any:
        """Return a new tensor, whose memory is mapped page by page when it is written."""
        return self._numpy.empty(tuple(sizes), self.dtype(dtype))

    def view(self, buffer: Any, dtype: str, offset: int, sizes: Sequence[int]) -> Any:
        """Return a tensor that shares the memory of a buffer."""
        return self._numpy.ndarray(tuple(sizes), dtype, buffer, offset)

    def copy(self, to: Any, value: Any) -> None:
        """Copy a tensor into another one of the same shape, with a cast if their dtypes differ."""
        to[...] = value

    def memory(self, value: Any) -> Run:
        """Return where a tensor is."""
        return Run("cpu", value.__array_interface__["data"][0], value.strides)

    def dtype_name(self, value: Any) -> str:
        """Return the name of a tensor's dtype, which is the same in all libraries."""
        return str(value.dtype)


class TorchLibrary:
    """Operations on torch tensors. Nothing here needs numpy."""

    def __init__(self) -> None:
        self._torch = importlib.import_module("torch")

    def dtype(self, name: str) -> Any:
        """Return the dtype of this name; TypeError if there is none."""
        dtype = getattr(self._torch, name, None)
        if not isinstance(dtype, self._torch.dtype):
            raise TypeError(f"torch has no dtype {name!r}")
        return dtype

    def empty(self, sizes: Sequence[int], dtype: str) -> Any:
        """Return a new tensor in host memory."""
        return self._torch.empty(tuple(sizes), dtype=self.dtype(dtype))

    def view(self, buffer: Any, dtype: str, offset: int, sizes: Sequence[int]) -> Any:
        """Return a tensor that shares the memory of a buffer."""
        count = math.prod(sizes)
        with warnings.catch_warnings():
            # It warns that the buffer cannot be written; it is never written.
            warnings.simplefilter("ignore")
            flat = self._torch.frombuffer(buffer, dtype=self.dtype(dtype), count=count, offset=offset)
        return flat.view(tuple(sizes))

    def copy(self, to: Any, value: Any) -> None:
        """Copy a tensor into another one of the same shape, with a cast if their dtypes differ."""
        with self._torch.inference_mode() if to.is_inference() else self._torch.no_grad():
            to.copy_(value)

    def memory(self, value: Any) -> Run:
        """Return where a tensor is."""
        itemsize = value.element_size()
        return Run(str(value.device), value.data_ptr(), tuple(stride * itemsize for stride in value.stride()))

    def dtype_name(self, value: Any) -> str:
        """Return the name of a tensor's dtype, which is the same in all libraries."""
        return str(value.dtype).removeprefix("torch.")


def library(name: str) -> Any:
    """Return the operations of a library by its name."""
    return TorchLibrary() if name == "torch" else NumpyLibrary()


def look(value: Any) -> tuple[tuple[Any, ...], Any]:
    """Return what identifies a tensor and its memory, and the tensor that this process holds of it.

    The first part is cheap, and changes whenever `describe` may return something else.

    Raises:
        TypeError, ValueError: it is nothing that can travel; says why.
    """
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray):
        if hasattr(value, "mask") and hasattr(value, "filled"):
            raise TypeError("a masked array cannot be transferred, because its mask would be lost: return value.data")
        if value.dtype.kind not in "biufcV" or value.dtype.fields:
            raise TypeError(f"arrays of dtype {value.dtype} cannot be transferred; numbers and bool can")
        return ("numpy", value.dtype, value.shape, value.strides, value.__array_interface__["data"][0]), value
    if torch is not None and isinstance(value, torch.Tensor):
        placements = getattr(value, "placements", None)
        with torch.no_grad():
            local = value if placements is None else value.to_local()
            # An AsyncCollectiveTensor has no memory of its own.
            local = (local.trigger_wait() if hasattr(local, "trigger_wait") else local).detach()
            local = local.resolve_conj().resolve_neg()  # copies what is a lazy conjugate or negative of its memory
        if local.layout is not torch.strided or local.is_quantized or local.is_meta:
            raise TypeError("only dense tensors can be transferred, not sparse, quantized or meta ones")
        reach = 1 + sum((size - 1) * stride for size, stride in zip(local.shape, local.stride(), strict=True))
        if local.numel() and not (
            local.data_ptr()
            and local.untyped_storage().nbytes() >= (local.storage_offset() + reach) * local.element_size()
        ):
            raise ValueError("its memory has been freed, or belongs to a tensor that it wraps: return a plain tensor")
        mark = "torch", local.dtype, local.shape, local.stride(), local.data_ptr(), local.device
        if placements is None:
            return mark, local
        return (*mark, tuple(value.shape), tuple(map(repr, placements)), id(value.device_mesh)), local
    if hasattr(value, "tensor") and hasattr(value, "global_shape") and hasattr(value, "offsets"):
        mark, local = look(value.tensor)
        return (*mark, tuple(value.global_shape), tuple(value.offsets)), local
    raise TypeError(
        f"a {type(value).__module__}.{type(value).__qualname__} cannot be transferred: return numpy arrays, torch "
        "tensors, DTensors or LocalTensors"
    )


def finish(tensors: Iterable[Any]) -> None:
    """Wait until the GPUs of tensors have done what they were asked, on all streams: other processes know of none."""
    for device in {tensor.device for tensor in tensors if getattr(tensor, "is_cuda", False)}:
        sys.modules["torch"].cuda.synchronize(device)


def describe(value: Any) -> tuple[str, str, int, tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Return library, dtype, item size, global shape, offsets and sizes of a tensor; refuse one without a box."""
    _, local = look(value)
    name = "numpy" if type(local).__module__.partition(".")[0] == "numpy" else "torch"
    itemsize = local.itemsize if name == "numpy" else local.element_size()
    sizes = tuple(local.shape)
    if hasattr(value, "placements"):
        shape, offsets = tuple(value.shape), _offsets(value, sizes)
    elif hasattr(value, "global_shape"):
        shape, offsets = tuple(map(int, value.global_shape)), tuple(map(int, value.offsets))
        if not len(shape) == len(offsets) == len(sizes):
            raise ValueError(f"a LocalTensor of shape {sizes} has global_shape {shape} and offsets {offsets}")
        if any(first < 0 or first + size > length for first, size, length in zip(offsets, sizes, shape, strict=True)):
            raise ValueError(f"the box at {offsets} of sizes {sizes} is outside of the global shape {shape}")
    else:
        shape, offsets = sizes, (0,) * len(sizes)
    return name, library(name).dtype_name(local), itemsize, shape, offsets, sizes


def _offsets(value: Any, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return where the local part of a DTensor begins; refuse one that is no box of the global tensor."""
    if any(hasattr(placement, "split_factor") for placement in value.placements):
        offsets, lengths = _strided_box(value)
    else:
        chunks = value.__create_chunk_list__()  # refuses partial placements
        offsets, lengths = (chunks[0].offsets, tuple(chunks[0].sizes)) if len(chunks) == 1 else ((), ())
    if lengths != sizes:
        raise ValueError(
            f"the local part of a DTensor with placements {value.placements} is not one box; transfer its boxes as "
            "LocalTensors"
        )
    # Empty parts may begin at the end.
    return tuple(int(offset) for offset in offsets) if 0 not in sizes else (0,) * len(sizes)


def _strided_box(value: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return offsets and sizes of the local part of a DTensor with strided shards.

    FSDP2 makes them: each splits what the shards to its right have split before, as tensor parallelism does. A local
    part that may consist of several boxes is refused.
    """
    mesh, placements = value.device_mesh, value.placements
    order: list[int] = []
    for axis in reversed(range(len(placements))):
        factor = getattr(placements[axis], "split_factor", None)
        inner = [mesh.size(other) for other in order if placements[other].dim == getattr(placements[axis], "dim", None)]
        if placements[axis].is_partial() or (factor is not None and factor != math.prod(inner)):
            raise ValueError(
                f"the local part of a DTensor of shape {tuple(value.shape)} with placements {placements} may consist "
                "of several boxes, or is partial; transfer its boxes as LocalTensors"
            )
        if hasattr(placements[axis], "dim"):
            order.insert(0 if factor is None else len(order), axis)
    offsets, sizes = [0] * value.ndim, list(value.shape)
    for axis in order:
        dim = placements[axis].dim
        chunk = -(-sizes[dim] // mesh.size(axis))  # as torch.chunk
        begin = min(sizes[dim], mesh.get_coordinate()[axis] * chunk)
        offsets[dim], sizes[dim] = offsets[dim] + begin, min(chunk, sizes[dim] - begin)
    return tuple(offsets), tuple(sizes)


def copy_all(tools: Any, pairs: Iterable[tuple[Any, Any]]) -> None:
    """Copy many tensors, each into the first of its pair."""
    for to, value in pairs:
        tools.copy(to, value)


def part(tensor: Any, box: tuple[slice, ...]) -> Any:
    """Return a box of a tensor, which shares its memory; a scalar has one part."""
    return tensor[box] if tensor.ndim else tensor.reshape(1)


def digest(tools: Any, tensor: Any, dtype: str) -> int:
    """Return the crc32 of a tensor's bytes, in order, as they travel."""
    buffer = bytearray(nbytes(tools, tensor.shape, dtype))
    if buffer:
        tools.copy(tools.view(buffer, dtype, 0, tuple(tensor.shape)), tensor)
    return zlib.crc32(buffer)


def nbytes(tools: Any, sizes: Sequence[int], dtype: str) -> int:
    """Return how many bytes a dense tensor has."""
    return int(tools.dtype(dtype).itemsize) * math.prod(sizes)


def find_overlapping(tools: Any, tensors: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the tensors that share elements with another one, where the last one would win: names and reasons."""
    filled = {name: local for name, local in tensors.items() if 0 not in local.shape}
    runs = sorted(
        (tools.memory(local).device, *run, name) for name, local in filled.items() for run in _find_runs(tools, local)
    )
    wrong: dict[str, str] = {}
    reaching = ("", 0, 0, "")  # of the runs before, the one that ends last
    for run in runs:
        device, _, end, before = reaching
        if run[0] == device and run[1] < end and run[3] != before:
            first, second = sorted((run[3], before), key=list(tensors).index)
            why = f"it shares some of its memory with {first!r}: return only one of them, or exclude one"
            wrong.setdefault(second, why)
        if run[0] != device or run[2] > end:
            reaching = run
    return list(wrong.items())


def _find_runs(tools: Any, tensor: Any) -> list[tuple[int, int]]:
    """Return the pieces of memory of a tensor in order, each with its first address and its end."""
    _, address, strides = tools.memory(tensor)
    length, begins = nbytes(tools, (1,), tools.dtype_name(tensor)), [address]
    dims = sorted((abs(stride), stride, size) for stride, size in zip(strides, tensor.shape, strict=True) if size > 1)
    for reach, stride, size in dims:
        if stride < 0:
            begins = [begin + (size - 1) * stride for begin in begins]
        if reach == length and len(begins) == 1:
            length *= size
        else:
            begins = [begin + index * reach for index in range(size) for begin in begins]
    return [(begin, begin + length) for begin in sorted(begins)]


def join_pieces(
    tools: Any, tasks: Mapping[str, Any], pieces: Iterable[tuple[int, Any, Any]], chunk_bytes: int
) -> Iterator[dict[str, Any]]:
    """Yield whole tensors in parts of at most so many bytes; a larger tensor is a part by itself."""
    by_tensor: dict[int, list[Any]] = {}
    for index, box, value in pieces:
        by_tensor.setdefault(index, []).append((box, value))
    chunk: dict[str, Any] = {}
    size = 0
    for index, parts in sorted(by_tensor.items()):
        shape, dtype = tasks["shapes"][index], tasks["dtypes"][index]
        length = nbytes(tools, shape, dtype)
        if chunk and size + length > chunk_bytes:
            yield chunk
            chunk, size = {}, 0
        whole = chunk[tasks["names"][index]] = tools.empty(shape, dtype)
        for box, value in parts:
            tools.copy(part(whole, box), value)
        size += length
    if chunk:
        yield chunk


def check_tensors(values: Any, method: str) -> list[tuple[str, str]]:
    """Return what is wrong with what a method has returned: pairs of a name and a reason."""
    if not isinstance(values, Mapping):
        return [("", f"{method!r} must return a dict from name to tensor, got {type(values).__qualname__}")]
    wrong = []
    for name, value in values.items():
        if not isinstance(name, str):
            wrong.append((repr(name), f"a name must be a str, got {type(name).__qualname__}"))
            continue
        try:
            describe(value)
        except (TypeError, ValueError) as error:
            wrong.append((name, str(error)))
    return wrong


def check_writable(tensors: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the tensors that new values cannot be written into: pairs of a name and a reason."""
    gathered = find_gathered()
    return [(name, why) for name, local in tensors.items() if (why := _explain_unwritable(local, gathered))]


def find_gathered() -> set[int]:
    """Return the addresses of parameters that FSDP2 has gathered, and will free; it has no public list of them."""
    known = getattr(sys.modules.get("torch.distributed._composable_state"), "_module_state_mapping", {})
    groups: list[Any] = []
    for state in [reference() for reference in list(known.values())]:
        # Older versions of torch have one group for each state.
        groups += getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
    parameters = [parameter for group in groups if group is not None for parameter in group.fsdp_params]
    names = "_unsharded_param", "_sharded_post_forward_param"
    copies = [getattr(parameter, name, None) for parameter in parameters for name in names]
    parts = [copy.to_local() if hasattr(copy, "to_local") else copy for copy in copies if copy is not None]
    return {local.untyped_storage().data_ptr() for local in parts if local.numel()}.difference([0])


def _explain_unwritable(local: Any, gathered: Collection[int]) -> str:
    """Return why new values cannot be written into the memory of a tensor; an empty text if they can."""
    if 0 in local.shape:
        return ""
    if hasattr(local, "flags") and not local.flags.writeable:
        return "the array is read-only: return one that can be written"
    if gathered and hasattr(local, "untyped_storage") and local.untyped_storage().data_ptr() in gathered:
        return "FSDP2 has gathered it and will free it: call model.reshard() before the method returns it"
    strides, reach = (local.strides, local.itemsize) if hasattr(local, "strides") else (local.stride(), 1)
    for stride, size in sorted((abs(stride), size) for stride, size in zip(strides, local.shape, strict=True)):
        if size > 1 and stride < reach:
            return "its elements share memory, as those of an expanded tensor: return one where they do not"
        reach += (size - 1) * stride
    return ""

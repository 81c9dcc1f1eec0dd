"""The memory regions of an Intel GPU, which the kernel tells to who opens its render node and asks by ioctl.

The numbers and structures are those of include/uapi/drm/xe_drm.h and i915_drm.h of Linux.  In a tree of files, the file
in the place of the render node holds what the kernel would answer.  This module does not know what else to read.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import stat
import struct
from typing import TYPE_CHECKING, NamedTuple

from gpuguard.backends.drm import NotTold, refused
from gpuguard.locale.messages import sentence
from gpuguard.vendors import INTEL

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpuguard.backends.drm import Card

# _IOWR('d', number, structure): direction 3, the size of the structure, 'd' for DRM, and the number of the call.
_XE_DEVICE_QUERY = 3 << 30 | 40 << 16 | ord("d") << 8 | 0x40  # DRM_IOCTL_XE_DEVICE_QUERY
_I915_QUERY = 3 << 30 | 16 << 16 | ord("d") << 8 | 0x79  # DRM_IOCTL_I915_QUERY
_XE_MEM_REGIONS, _I915_MEMORY_REGIONS = 1, 4  # DRM_XE_DEVICE_QUERY_MEM_REGIONS, DRM_I915_QUERY_MEMORY_REGIONS
_XE_REQUEST = struct.Struct("=QIIQ16x")  # drm_xe_device_query: extensions, query, size, data
_I915_REQUEST = struct.Struct("=IIQ")  # drm_i915_query: num_items, flags, items_ptr
_I915_ITEM = struct.Struct("=QiIQ")  # drm_i915_query_item: query_id, length, flags, data_ptr
# drm_xe_mem_region: class, instance, page size, total_size, used.  drm_i915_memory_region_info: class, instance, a
# reserved number, probed_size, unallocated_size.  Each has 64 further bytes that are not needed here.
_REGION = struct.Struct("=HHIQQ64x")
_HEADERS = {"xe": 8, "i915": 16}  # bytes before the first region; the first four are the number of regions
_OF_GPU = 1  # DRM_XE_MEM_REGION_CLASS_VRAM, I915_MEMORY_CLASS_DEVICE; 0 is the memory of the host
_LONGEST = 2**16  # bytes of an answer; there are few regions


class MemoryRegion(NamedTuple):
    """A part of the memory that a GPU can use."""

    of_gpu: bool  # rather than of the host
    total: int  # bytes
    used: int  # bytes; 0 also where the kernel does not tell it to this user


def regions(root: str, card: Card) -> list[MemoryRegion]:
    """Ask for the memory regions of a GPU, which wakes it.

    Raises NotTold if the kernel does not tell them, and OSError ECANCELED if the driver has given up the GPU.
    """
    if card.render_minor is None:
        raise NotTold(sentence("intel.no_render_node", "it has no render node"))
    path = f"{root}{INTEL.device_node}{card.render_minor}"
    try:
        node = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        why = refused(error).reason
        raise NotTold(
            sentence("intel.node_closed", "{path} cannot be opened: {reason}", path=path, reason=why)
        ) from None
    try:
        if stat.S_ISCHR(os.fstat(node).st_mode):
            return parse_regions(card.driver, _ASK[card.driver](node))
        return parse_regions(card.driver, os.read(node, _LONGEST))
    finally:
        os.close(node)


def parse_regions(driver: str, answer: bytes) -> list[MemoryRegion]:
    """Return the regions in an answer of the kernel.  Raises NotTold if it cannot be one."""
    header = _HEADERS[driver]
    count = int.from_bytes(answer[:4], "little") if len(answer) >= header else 0
    if not count or len(answer) < header + count * _REGION.size:
        raise NotTold(sentence("intel.odd_regions", "the driver's answer of {size} bytes is odd", size=len(answer)))
    rows = (_REGION.unpack_from(answer, header + index * _REGION.size) for index in range(count))
    found = []
    for kind, _, _, total, rest in rows:
        used = rest if driver == "xe" else total - rest
        found.append(MemoryRegion(kind == _OF_GPU, total, used if 0 <= used <= total else 0))
    return found


def _ask_xe(node: int) -> bytes:
    request = bytearray(_XE_REQUEST.pack(0, _XE_MEM_REGIONS, 0, 0))
    fcntl.ioctl(node, _XE_DEVICE_QUERY, request)  # which says how long the answer is
    answer = _room_for(_XE_REQUEST.unpack(request)[2])
    request = bytearray(_XE_REQUEST.pack(0, _XE_MEM_REGIONS, len(answer), ctypes.addressof(answer)))
    fcntl.ioctl(node, _XE_DEVICE_QUERY, request)
    return answer.raw


def _ask_i915(node: int) -> bytes:
    answer = _room_for(_item_length(node, 0, 0))
    _item_length(node, len(answer), ctypes.addressof(answer))
    return answer.raw


def _item_length(node: int, length: int, address: int) -> int:
    item = ctypes.create_string_buffer(_I915_ITEM.pack(_I915_MEMORY_REGIONS, length, 0, address), _I915_ITEM.size)
    fcntl.ioctl(node, _I915_QUERY, bytearray(_I915_REQUEST.pack(1, 0, ctypes.addressof(item))))
    return int(_I915_ITEM.unpack(item.raw)[1])  # or an error number below 0


def _room_for(length: int) -> ctypes.Array[ctypes.c_char]:
    if not 0 < length <= _LONGEST:
        raise NotTold(sentence("intel.no_regions", "this driver does not tell its memory regions"))
    return ctypes.create_string_buffer(length)


_ASK: dict[str, Callable[[int], bytes]] = {"xe": _ask_xe, "i915": _ask_i915}

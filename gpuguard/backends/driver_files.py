"""Where NVIDIA's kernel driver shows itself: device nodes, and files of /proc and /sys.  Opens no device."""

from __future__ import annotations

import os

DEVICE_NODE = "/dev/nvidia"  # and the minor number of the device
CONTROL_NODE = "/dev/nvidiactl"  # every process that computes on an NVIDIA device has it open
UVM_NODE = "/dev/nvidia-uvm"  # opened by cuInit, and by no program that only reads the driver
CAPABILITY_MINORS = "/proc/driver/nvidia-caps/mig-minors"  # "gpu0/gi1/ci0/access 13"
_VERSIONS = ("/sys/module/nvidia/version", "/proc/driver/nvidia/version")


def kernel_version() -> str | None:
    """The version of the loaded kernel module, "580.65.06"; None when it does not say."""
    for path in _VERSIONS:
        if os.path.exists(path):
            with open(path, encoding="utf-8", errors="replace") as file:
                words = file.read().partition("\n")[0].split()
            return next((word for word in words if word[0].isdigit() and "." in word), None)
    return None

"""Random machines with everything that was once decided in two places.

Desktops of one and of several users, and what only looks like one; processes that have ended; lists of processes that
are missing or not plausible; divided, quarantined, reserved and sleeping devices; claims that no process holds.

snapshot, stats = a_random_machine(seed)        stats: what /proc says of the processes
"""

import random
from dataclasses import replace

from builders import GIB, MIB, a_claim_record, a_device, a_mig_instance, a_process, a_snapshot

from gpuguard.model import Device, Gap, ProcessStat, Snapshot


def a_random_device(dice: random.Random, index: int) -> Device:
    processes = tuple(
        a_process(
            pid=100 * index + number + 10,
            kind=dice.choice(("compute", "graphics", "graphics", "compute+graphics", "mps")),
            memory_used=dice.choice((None, 25 * MIB, 300 * MIB, GIB, 3 * GIB // 2, 20 * GIB)),
            uid=(uid := dice.choice((1001, 1002, 0, None))),
            user=None if uid is None else {0: "root", 1001: "alice", 1002: "bob"}[uid],
        )
        for number in range(dice.choice((0, 1, 1, 2, 3)))
    )
    if dice.random() < 0.1:
        ended = {"ended": True, "uid": None, "user": None, "start_time": None}
        processes = tuple(replace(process, **ended) for process in processes[:1]) + processes[1:]
    listed = sum(process.memory_used or 0 for process in processes)
    return a_device(
        index,
        processes=dice.choice((processes, processes, processes, None)),
        processes_plausible=dice.random() < 0.85,
        memory_used=dice.choice((None, listed, listed + 4 * MIB, listed + 700 * MIB, listed + 10 * GIB)),
        memory_reserved=dice.choice((0, 0, None)),
        utilization=dice.choice((None, 0.0, 0.9, 1.0, 5.0, 90.0)),
        problems=dice.choice(((),) * 8 + (("lost",),)),
        compute_mode=dice.choice(("default",) * 8 + ("exclusive_process", "prohibited")),
        mig_mode=dice.random() < 0.15,
        asleep=dice.random() < 0.2,
    )


def a_random_machine(seed: int) -> tuple[Snapshot, dict[int, ProcessStat | None]]:
    dice = random.Random(seed)
    devices: list[Device] = []
    for index in range(dice.randrange(1, 5)):
        devices.append(device := a_random_device(dice, index))
        for number in range(dice.randrange(3) if device.mig_mode else 0):
            random_fields = vars(a_random_device(dice, 10 * (index + 1) + number))
            taken = ("processes", "processes_plausible", "memory_used", "problems", "utilization")
            devices.append(a_mig_instance(device, number, **{name: random_fields[name] for name in taken}))
    uuids = [device.uuid for device in devices]
    pids = [process.pid for device in devices for process in device.processes or ()]
    claims = tuple(
        a_claim_record(
            *dice.sample(uuids, dice.randrange(1, len(uuids) + 1)),
            id=f"c{number}",
            uid=(uid := dice.choice((1001, 1002, -1))),
            user={1001: "alice", 1002: "bob", -1: "unknown"}[uid],
            alive=dice.random() < 0.9,
            hidden=uid < 0 and dice.random() < 0.5,
            holders=tuple(dice.sample(pids, min(1, len(pids)))) if uid > 0 and dice.random() < 0.4 else (),
        )
        for number in range(dice.randrange(3))
    )
    stats = {pid: ProcessStat(4700 if dice.random() < 0.3 else 1, "S", 1000.0) for pid in pids if dice.random() < 0.8}
    snapshot = a_snapshot(
        *devices,
        claims=claims,
        quarantined=tuple((uuid, "quarantined by the administrator") for uuid in uuids if dice.random() < 0.1),
        reserved=tuple((uuid, "kept for carol's reservation") for uuid in uuids if dice.random() < 0.1),
        gaps=(Gap(None, "claims", "no such directory"),) if dice.random() < 0.05 else (),
    )
    return snapshot, {4700: ProcessStat(1, "S", 900.0), **stats}

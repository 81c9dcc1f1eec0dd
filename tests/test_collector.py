"""Numbers for a training log: right sums, nested tags, any thread, and a driver that fails costs only its numbers."""

import math
import os
import subprocess
import sys
import threading
import time
import warnings

import pytest
from builders import GIB, MIB, Scripted, a_device, a_mig_instance, a_process, a_snapshot
from nodes import eventually, start

import gpuguard
from gpuguard.errors import BackendError, InvalidRequest
from gpuguard.host import HostNumbers, members_of
from gpuguard.model import Snapshot
from gpuguard.training_log import Collector

SLOW = 3600.0  # an interval in which the thread looks once


def a_collector(*shown: Snapshot | BackendError, **options) -> Collector:
    options.setdefault("environ", {})
    return gpuguard.collector(
        options.pop("pids", ()), options.pop("interval", SLOW), backend=Scripted(*shown), **options
    )


def busy(*utilizations: float | None) -> list[Snapshot]:
    return [a_snapshot(a_device(utilization=one, memory_used=GIB)) for one in utilizations]


def look(numbers: Collector, times: int) -> None:
    """Until it has looked so often."""
    while numbers.collect()["samples"] < times:
        numbers.look()


def test_a_number_has_its_mean_its_extremes_and_its_newest():
    with a_collector(*busy(10, 90, 20)) as numbers:
        look(numbers, 3)
        found = numbers.collect()

    assert {key.rpartition("/")[2]: value for key, value in found.items() if "gpu:0/utilization (%)" in key} == {
        "mean": 40.0, "min": 10.0, "max": 90.0, "last": 20.0,
    }  # fmt: skip
    assert found["gpu:0/memory_used (MiB)/mean"] == 1024.0
    assert found["samples"] == 3 and found["duration (s)"] > 0


def test_what_is_not_known_is_left_out_and_counts_for_nothing():
    with a_collector(*busy(10, None, 30)) as numbers:
        look(numbers, 3)
        assert numbers.collect()["gpu:0/utilization (%)/mean"] == 20.0

    with a_collector(*busy(None)) as numbers:
        found = numbers.collect()
    assert [key for key in found if "gpu:0/utilization" in key] == []
    assert all(isinstance(value, float) and math.isfinite(value) for value in found.values())


def test_a_tag_counts_from_its_beginning_and_can_be_inside_another_one():
    with a_collector(*busy(0, 10, 20, 30, 40)) as numbers:
        assert eventually(lambda: numbers._newest is not None)
        with numbers.tag("train"):
            numbers.sample()
            with numbers.tag("step"):
                numbers.sample()
                inner = numbers.collect()
            numbers.sample()
            outer = numbers.collect()
        whole = numbers.collect()

    assert inner["train/step/gpu:0/utilization (%)/mean"] == 20.0
    assert {key.split("gpu:")[0] for key in inner if "gpu:" in key} == {"train/step/"}
    assert outer["train/gpu:0/utilization (%)/mean"] == 20.0 and outer["train/samples"] == 3
    assert whole["gpu:0/utilization (%)/mean"] == 15.0


def test_a_tag_that_is_over_sooner_than_an_interval_has_a_sample_all_the_same_and_clear_begins_it_anew():
    with a_collector(*busy(0, 50, 100)) as numbers:
        assert eventually(lambda: numbers._newest is not None)
        with numbers.tag("short"):
            assert numbers.collect()["short/gpu:0/utilization (%)/last"] == 50.0
            numbers.clear()
            numbers.sample()
            assert numbers.collect()["short/gpu:0/utilization (%)/mean"] == 100.0


@pytest.mark.parametrize("name", ["", "a/b"])
def test_a_name_that_cannot_be_told_from_a_path_is_no_tag(name):
    with a_collector(*busy(0)) as numbers, pytest.raises(InvalidRequest), numbers.tag(name):
        pass


def test_it_can_be_started_again_and_stopped_twice():
    numbers = a_collector(*busy(10, 90))
    with numbers:
        numbers.collect()
    before = numbers.collect()
    numbers.stop()
    with numbers:
        assert numbers.collect()["gpu:0/utilization (%)/min"] == 90.0

    assert before["gpu:0/utilization (%)/max"] <= 90.0
    assert [thread.name for thread in threading.enumerate() if thread.name == "gpuguard"] == []


@pytest.mark.parametrize("interval", [0, -1, 0.01, float("nan")])
def test_an_interval_that_would_keep_the_driver_busy_is_refused(interval):
    with pytest.raises(InvalidRequest):
        gpuguard.collector(interval=interval)


def test_any_thread_may_collect_tag_and_clear():
    faults: list[Exception] = []

    def work(name: str) -> None:
        try:
            for _ in range(100):
                with numbers.tag(name):
                    numbers.sample()
                    numbers.collect()
                    numbers.clear()
        except Exception as error:  # noqa: BLE001  whatever it is fails the test
            faults.append(error)

    with a_collector(*busy(1), interval=0.05) as numbers:
        threads = [threading.Thread(target=work, args=(f"t{number}",)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    assert faults == []
    assert [tag.name for tag in numbers._tags] == [""]


def test_processes_are_counted_with_their_descendants():
    code = "import subprocess, time; subprocess.Popen(['sleep', '600']); print('x', flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True) as job:
        try:
            job.stdout.readline()
            (child,) = members_of(job.pid).keys() - {job.pid}
            rows = [a_process(pid, memory_used=memory, utilization=share) for pid, memory, share in
                    ((job.pid, 100 * MIB, 20.0), (child, 50 * MIB, 5.0), (1, 4000 * MIB, 70.0))]  # fmt: skip
            with a_collector(a_snapshot(a_device(processes=tuple(rows))), pids={job.pid}) as numbers:
                found = numbers.collect()
        finally:
            os.killpg(job.pid, 9)

    scope = f"pid:{job.pid}"
    assert found[f"{scope}/gpu:0/memory_used (MiB)/last"] == 150.0
    assert found[f"{scope}/gpu:0/utilization (%)/last"] == 25.0
    assert found[f"{scope}/host/processes/last"] == 2.0
    assert found[f"{scope}/host/memory_resident (MiB)/last"] > 1


def test_an_unknown_share_makes_the_sum_unknown_and_no_process_is_zero():
    mine = os.getpid()
    unknown = a_snapshot(a_device(processes=(a_process(mine, memory_used=None),)))
    with a_collector(unknown, pids={mine}) as numbers:
        assert not [key for key in numbers.collect() if key.startswith(f"pid:{mine}/gpu")]
    for devices, expected in ((a_device(processes=()), [0.0]), (a_device(processes=None), []),
                              (a_device(processes=(a_process(mine),), processes_plausible=False), [])):  # fmt: skip
        with a_collector(a_snapshot(devices), pids={mine}) as numbers:
            found = numbers.collect()
        assert [value for key, value in found.items() if key == f"pid:{mine}/gpu:0/memory_used (MiB)/last"] == expected


def test_cpu_is_what_was_used_since_the_look_before():
    numbers, mine = HostNumbers(), os.getpid()
    assert numbers.tree(mine, members_of(mine))["cpu (%)"] is None
    began, until = time.monotonic(), time.process_time() + 0.3
    while time.process_time() < until:
        pass
    cpu = numbers.tree(mine, members_of(mine))["cpu (%)"]

    had = 100 * 0.3 / (time.monotonic() - began)  # a processor is seldom ours alone
    assert cpu is not None and had / 2 < cpu < 150
    assert numbers.tree(2**22 - 3, members_of(2**22 - 3)) == {}
    assert {"cpu (%)", "memory_used (MiB)", "load_1m"} <= numbers.host().keys()


def test_only_the_devices_that_are_left_to_this_process_are_counted():
    machine = a_snapshot(a_device(0), a_device(1), a_device(2))

    def gpus(**options):
        with a_collector(machine, **options) as numbers:
            return {key.split("/")[0] for key in numbers.collect() if key.startswith("gpu:")}

    assert gpus() == {"gpu:0", "gpu:1", "gpu:2"}
    assert gpus(environ={"CUDA_VISIBLE_DEVICES": "2,0"}) == {"gpu:0", "gpu:2"}
    assert gpus(environ={"CUDA_VISIBLE_DEVICES": ""}) == set()
    assert gpus(devices=[machine.devices[1].uuid]) == {"gpu:1"}


def test_an_instance_that_is_left_to_this_process_is_found():
    parent = a_device(0, mig_mode=True)
    instance = a_mig_instance(parent)
    options = {"environ": {"CUDA_VISIBLE_DEVICES": instance.uuid}}
    with a_collector(a_snapshot(parent), a_snapshot(parent, instance), **options) as numbers:
        found = numbers.collect()

    assert {key.split("/")[0] for key in found if key.startswith("gpu:")} == {"gpu:0.1"}


def test_a_driver_that_fails_costs_only_its_numbers():
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with a_collector(BackendError("it is gone"), *busy(7)) as numbers:
            assert eventually(lambda: numbers._newest is not None)
            before, trouble = numbers._tags[0].numbers(), numbers.trouble
            numbers.sample()
            after = numbers.collect()

    assert "host/memory_used (MiB)/last" in before and not [key for key in before if "gpu:" in key]
    assert trouble == "it is gone" and numbers.trouble is None
    assert after["gpu:0/utilization (%)/mean"] == 7.0
    assert len([one for one in told if "it is gone" in str(one.message)]) == 1


def test_a_forked_worker_neither_looks_nor_waits():
    with a_collector(*busy(10)) as numbers:
        numbers.collect()
        numbers._sampling.acquire()  # as if it were forked in the middle of a look
        child = os.fork()
        if not child:
            os._exit(0 if numbers.collect() == {} and numbers.stop() is None else 1)  # type: ignore[func-returns-value]
        numbers._sampling.release()

    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_when_it_has_stopped_nothing_of_it_is_left_for_who_waits_for_any_child(tmp_path):
    code = f"""
import gpuguard, os
with gpuguard.collector(backend="simulated:{tmp_path}/node", environ={{}}) as numbers:
    numbers.collect()
os.wait()
"""
    start(str(tmp_path / "node"), "1xH100-80GB")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert "ChildProcessError" in done.stderr


def test_it_looks_by_itself_at_its_interval_at_a_simulated_node(tmp_path):
    start(str(tmp_path / "node"), "2xH100-80GB")
    with gpuguard.collector(interval=0.05, backend=f"simulated:{tmp_path}/node", environ={}) as numbers:
        assert eventually(lambda: numbers.collect()["samples"] >= 5)
        found = numbers.collect()

    assert {key.split("/")[0] for key in found} >= {"gpu:0", "gpu:1", "host", f"pid:{os.getpid()}", "samples"}
    assert found["gpu:1/memory_free (MiB)/last"] > 1000

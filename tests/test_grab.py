"""grab_gpus() and the looks at the machine, as a training script uses them: what they take, refuse and say."""

import os
import sys
from fractions import Fraction

import pytest
from grab_node import a_node, claimed, indices, script, visible  # noqa: F401  (a fixture)
from nodes import GIB, a_user, change, start

import gpuguard
from gpuguard import api
from gpuguard.claims import claim as hold
from gpuguard.claims.directory import lock_directory
from gpuguard.claims.records import probe
from gpuguard.errors import CudaInitialized, ImpossibleRequest, InvalidRequest, NotEnoughGpus
from gpuguard.lock import Allocator
from gpuguard.model import MEMORY
from gpuguard.queue.tickets import waiting_tickets


def test_one_device_by_default_and_cuda_sees_no_other():
    claim = gpuguard.grab_gpus()

    assert (len(claim), indices(claim), visible()) == (1, [3], "3")
    assert os.environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert claimed() == [3]


def test_the_positions_and_keywords_are_those_of_py3nvml():
    two = gpuguard.grab_gpus(
        num_gpus=2, gpu_select=range(3), gpu_fraction=0.95, max_procs=-1, env_set_ok=False, gpu_min_memory=80_000
    )
    assert len(two) == 2 and 3 not in indices(two)

    two.release()
    os.environ["CUDA_VISIBLE_DEVICES"] = "0,1,2"
    assert indices(gpuguard.grab_gpus(1, [0, 1], 0.5, 0, True, 1000)) == [1]


def test_minus_one_takes_all_that_are_free(node):
    with a_user(node, "2", 10 * GIB):
        claim = gpuguard.grab_gpus(-1)

    assert indices(claim) == [0, 1, 3]
    with pytest.raises(NotEnoughGpus):
        gpuguard.grab_gpus(-1, gpu_select=0, further=True)
    claim.release()
    assert indices(gpuguard.grab_gpus(-1, gpu_select=[0, 2])) == [0, 2]


def test_a_share_of_calculated_bytes_is_one_that_others_can_read():
    claim = gpuguard.grab_gpus(share=True, memory=10e9)

    [record] = probe(lock_directory(backend="simulated"), [device.uuid for device in claim])
    assert record.memory == 10**10


class Enough(Exception):
    """What was waited for is seen."""


@pytest.mark.parametrize(
    "conditions", [{"min_free": 20e9}, {"max_util": Fraction(10)}, {"max_processes": Fraction(0)}], ids=str
)
def test_a_request_of_calculated_numbers_has_its_place_in_the_queue(conditions):
    """As of NumPy, whose numbers JSON does not know."""

    def look(_missing):
        raise Enough(*(ticket.requests for ticket in waiting_tickets(lock_directory(backend="simulated"))))

    gpuguard.grab_gpus(4)
    with pytest.raises(Enough) as seen:
        gpuguard.grab_gpus(further=True, wait=60, on_wait=look, **conditions)

    [(request,)] = seen.value.args
    assert {name: getattr(request, name) for name in conditions} == conditions


def test_zero_takes_none_and_cuda_sees_none():
    claim = gpuguard.grab_gpus(0)

    assert (len(claim), visible(), claimed()) == (0, "", [])
    claim.release()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"gpu_select": []}, "the list of GPUs is empty"),
        *(({"gpu_select": wrong}, "names no GPU of this machine") for wrong in (7, [7], -1)),
        ({"gpu_select": [1, 1]}, "names GPU 1 twice"),
        ({"num_gpus": -5}, "ask for at least 1"),
        ({"gpu_fraction": 1.5}, "1.5 is no fraction of the memory: ask for 0 to 1"),
        *(({"gpu_fraction": wrong}, "is no fraction") for wrong in (-0.1, float("nan"))),
        ({"backend": "nonesuch"}, "there is no backend 'nonesuch'"),
        ({"priority": "urgent"}, "there is no priority 'urgent': choose one of low, normal, high"),
        ({"alternatives": [{}] * 4}, "4 alternatives are too many: name at most 3"),
        ({"alternatives": [{"num_gpus": 0}]}, "ask for at least 1"),
        ({"num_gpus": "2"}, "num_gpus is a number: '2' is a text"),
        ({"min_free": float("inf")}, "min_free is a number of bytes"),
        ({"max_util": ["10"]}, "max_util is a number of percent"),
        ({"num_gpus": 1.0}, "1.0 GPUs cannot be asked for"),
        ({"wait": "soon"}, "wait: 'soon' is not a duration"),
        ({"min_free": "20"}, "min_free: '20' "),
        ({"min_free": "much"}, "min_free: 'much' "),
        ({"min_free": 20}, "min_free=20 is 20B of memory: write a unit, as in '20GiB'"),
        ({"share": True, "memory": 10}, "memory=10 is 10B of memory"),
        ({"alternatives": [{"min_free": 20}]}, "min_free=20 is 20B"),
        ({"min_free": "10KiB"}, "min_free='10KiB' is 10KiB of memory: write a unit"),
        ({"max_util": "10%"}, "max_util is a number of percent"),
        ({"gpu_min_memory": "9000"}, "gpu_min_memory is a number of MiB"),
    ],
)
def test_a_request_without_sense_is_a_value_error_and_changes_nothing(arguments, message):
    with pytest.raises(InvalidRequest, match=message) as caught:
        gpuguard.grab_gpus(**arguments)

    assert isinstance(caught.value, ValueError)
    assert (visible(), claimed()) == (None, [])


def test_sizes_and_times_may_be_texts_as_on_the_command_line():
    with pytest.raises(ImpossibleRequest, match="--min-free"):
        gpuguard.grab_gpus(1, min_free="200GiB", wait="2s")

    assert len(gpuguard.grab_gpus(1, min_free="20GiB", tolerance="1GiB", alternatives=[{"min_free": "10GiB"}])) == 1


def test_gpu_fraction_wants_that_part_of_the_memory_free(node):
    # 40 of some 79 GiB that an empty device has; max_procs lets the others' process be.
    with a_user(node, "all", 40 * GIB):
        with pytest.raises(NotEnoughGpus, match=r"only 49\.\d% of its memory is free, less than 95\.0%"):
            gpuguard.grab_gpus(1, gpu_fraction=0.95, max_procs=1)
        assert len(gpuguard.grab_gpus(1, gpu_fraction=0.45, max_procs=1)) == 1
    assert len(gpuguard.grab_gpus(3, gpu_fraction=0.95, further=True)) == 3  # so much is free of an idle one


def test_gpu_min_memory_is_in_mib():
    with pytest.raises(ImpossibleRequest):
        gpuguard.grab_gpus(1, gpu_min_memory=81_560)

    assert len(gpuguard.grab_gpus(1, gpu_min_memory=81_559)) == 1


def test_what_no_device_will_ever_do_is_refused_for_good_although_some_are_claimed():
    gpuguard.grab_gpus(2)
    with pytest.raises(ImpossibleRequest, match="none exists that can satisfy --model"):
        gpuguard.grab_gpus(1, models=["A100*"], further=True)
    with pytest.raises(NotEnoughGpus) as passing:
        gpuguard.grab_gpus(3, further=True)

    assert type(passing.value) is NotEnoughGpus


def test_max_procs_lets_so_many_processes_of_others_be(node):
    with a_user(node, "all", 10 * GIB):
        for none in (-1, 0):
            with pytest.raises(NotEnoughGpus):
                gpuguard.grab_gpus(1, max_procs=none)

        assert len(gpuguard.grab_gpus(1, max_procs=1)) == 1


def test_a_variable_that_is_set_limits_by_default_and_when_that_is_ok_and_is_refused_on_request():
    os.environ["CUDA_VISIBLE_DEVICES"] = "0,1"
    with pytest.raises(ValueError, match="CUDA_VISIBLE_DEVICES is set already: unset it"):
        gpuguard.grab_gpus(1, env_set_ok=False)
    assert (visible(), claimed()) == ("0,1", [])

    assert indices(gpuguard.grab_gpus(1)) == [1]
    assert indices(gpuguard.grab_gpus(1, env_set_ok=True, further=True)) == [0]
    with pytest.raises(NotEnoughGpus):
        gpuguard.grab_gpus(1, further=True)


def test_too_few_leave_the_environment_alone_and_nothing_claimed(node):
    with a_user(node, "0,1", 10 * GIB), pytest.raises(NotEnoughGpus) as caught:
        gpuguard.grab_gpus(3)

    assert (caught.value.wanted, caught.value.available) == (3, 2)
    assert (visible(), claimed()) == (None, [])


def test_one_process_gets_one_mig_instance_unless_it_says_that_it_starts_others(node):
    start(node, "1xH100-80GB:mig=3g.40gb,3g.40gb")

    with pytest.raises(ImpossibleRequest, match="one process can use only 1 here"):
        gpuguard.grab_gpus(2)
    with pytest.warns(RuntimeWarning), gpuguard.grab_gpus(2, strict=False) as claim:
        assert len(claim) == 1
    with gpuguard.grab_gpus(-1) as claim:
        assert len(claim) == 1
    with gpuguard.grab_gpus(2, allow_mig_set=True) as claim:
        assert len(claim) == 2


@pytest.mark.parametrize(
    ("used", "number", "taken", "why"),
    [
        ("0,1", 3, [2, 3], "wanted 3 GPUs, but only 2 are free now"),
        ("0", 9, [1, 2, 3], "only 4 exist"),
        ("all", 1, [], "Going on with what there is"),
        ("all", -1, [], "Going on with what there is"),
    ],
)
def test_not_strict_takes_what_there_is_and_warns_at_the_line_of_the_caller(node, used, number, taken, why):
    with a_user(node, used, 10 * GIB), pytest.warns(RuntimeWarning, match=why) as caught:
        claim = gpuguard.grab_gpus(number, strict=False)

    assert (indices(claim), visible()) == (taken, ",".join(map(str, taken)))
    assert [warning.filename for warning in caught] == [__file__]


def test_not_strict_goes_on_without_any_device_where_there_is_no_driver(tmp_path):
    """On a laptop; in a process of its own, because another test may have loaded a driver library into this one."""
    (tmp_path / "libnvidia-ml.so.1").write_text("no library")
    code = "import gpuguard, os; print(len(gpuguard.grab_gpus(strict=False)), repr(os.environ['CUDA_VISIBLE_DEVICES']))"
    done = script(code, GPUGUARD_BACKEND="nvml", GPUGUARD_DIR=str(tmp_path), LD_LIBRARY_PATH=str(tmp_path))

    assert (done.stdout, done.returncode) == ("0 ''\n", 0)
    assert "RuntimeWarning" in done.stderr


def test_the_first_request_is_liked_best_and_an_alternative_has_conditions_of_its_own():
    gpuguard.grab_gpus(2, alternatives=[{"num_gpus": 3}])
    gpuguard.grab_gpus(1, further=True)
    one = {"num_gpus": 1, "min_free": 40 * GIB, "exclude": ["1"]}
    claim = gpuguard.grab_gpus(2, alternatives=[one], further=True)

    assert indices(claim) == [0]
    with pytest.raises(NotEnoughGpus):
        gpuguard.grab_gpus(2, alternatives=[{"num_gpus": 1}], further=True)


def test_who_waits_in_python_is_seen_and_hears_why(node):
    from gpuguard.queue.tickets import read_tickets

    holder = gpuguard.grab_gpus(4)
    seen, told = [], []

    def on_wait(error):
        seen.extend(read_tickets(lock_directory(backend="simulated"))[0])
        told.append(str(error))
        holder.release()

    ways = [{"num_gpus": 1, "models": ["A100*", "H100*"]}]
    more = {"further": True, "priority": "low", "on_wait": on_wait}
    claim = gpuguard.grab_gpus(2, wait=30, models=["H100*"], alternatives=ways, **more)

    assert len(claim) == 2
    assert [(way.num_gpus, way.models) for way in seen[0].requests] == [(2, ("H100*",)), (1, ("A100*", "H100*"))]
    assert (seen[0].priority, seen[0].pid) == (-1, os.getpid())
    assert told[0].startswith("wanted 2 GPUs: number 1 of 1 in the queue, ")


def test_cuda_that_is_initialised_is_refused(monkeypatch, tmp_path):
    device = tmp_path / "nvidia-uvm"
    device.touch()
    monkeypatch.setattr(api, "CUDA_DEVICES", (str(device),))
    gpuguard.grab_gpus().release()
    with device.open(), pytest.raises(CudaInitialized, match="before the first use of CUDA"):
        gpuguard.grab_gpus()

    assert claimed() == []


def test_select_devices_says_what_grab_gpus_would_take_and_claims_nothing():
    selected = gpuguard.select_devices(2, exclude=("3",))

    assert claimed() == []
    assert [device.uuid for device in selected] == [device.uuid for device in gpuguard.grab_gpus(2, exclude=("3",))]


def test_select_devices_raises_when_there_are_too_few_and_says_why(node):
    with a_user(node, "0", 10 * GIB) as user, pytest.raises(NotEnoughGpus) as caught:
        gpuguard.select_devices(4)

    assert (caught.value.wanted, caught.value.available) == (4, 3)
    assert f"pid {user.pid}" in str(caught.value)


def test_select_devices_takes_what_became_free_while_it_looked_for_reasons(node, monkeypatch):
    looks = Allocator.preview
    with a_user(node, "0", 10 * GIB) as user:

        def ends_meanwhile(*of, **more):
            answer = looks(*of, **more)
            user.kill()
            user.wait()
            return answer

        monkeypatch.setattr(Allocator, "preview", ends_meanwhile)

        assert len(gpuguard.select_devices(4)) == 4


def test_snapshot_shows_the_machine_and_leaves_out_what_was_not_asked_for(node):
    change(node, 1, faults=("lost",))
    seen, memory = gpuguard.snapshot(), gpuguard.snapshot({MEMORY})

    assert [device.index for device in seen.devices if device.problems] == [1]
    assert seen.simulated and seen.devices[0].processes == ()
    assert (memory.devices[0].name, memory.devices[0].processes) == ("NVIDIA H100 80GB HBM3", None)
    assert gpuguard.snapshot("memory").devices == memory.devices
    with pytest.raises(gpuguard.InvalidRequest, match="no group of fields 'memroy': choose among clocks, "):
        gpuguard.snapshot({"memroy"})


def test_who_shows_the_claims_with_their_notes():
    claim = gpuguard.grab_gpus(2, note="night run")
    [record] = gpuguard.who().claims

    assert (record.id, record.note, record.pid) == (claim.id, "night run", os.getpid())
    assert record.devices == tuple(device.uuid for device in claim)
    assert record.command == tuple(sys.orig_argv)  # sys.argv of `python` alone is an empty word


@pytest.mark.parametrize(
    ("path", "note"), [("/home/alice/My study.ipynb", "notebook My study.ipynb"), ("", "notebook")]
)
def test_a_plain_call_in_a_notebook_is_named_after_it(monkeypatch, path, note):
    monkeypatch.setitem(sys.modules, "ipykernel", sys)  # whatever it is: it is loaded
    monkeypatch.setenv("JPY_SESSION_NAME", path)
    gpuguard.grab_gpus()

    assert [record.note for record in gpuguard.who().claims] == [note]


def test_a_share_leaves_the_rest_to_others_and_tells_the_frameworks(monkeypatch):
    for name in hold.SHARE_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TF_FORCE_GPU_ALLOW_GROWTH", "false")
    with gpuguard.claim(share=True, memory=10 * GIB, devices=("0",)) as share:
        assert os.environ["GPUGUARD_MEMORY"] == str(10 * GIB)
        with gpuguard.claim(devices=("1",)):
            assert "GPUGUARD_MEMORY" not in os.environ
            assert os.environ["TF_FORCE_GPU_ALLOW_GROWTH"] == "false"
        assert os.environ["TF_FORCE_GPU_ALLOW_GROWTH"] == "true"
        assert share.memory == 10 * GIB
    assert "GPUGUARD_MEMORY" not in os.environ
    assert os.environ["TF_FORCE_GPU_ALLOW_GROWTH"] == "false"


def test_an_empty_name_of_a_directory_is_none(monkeypatch):
    monkeypatch.setenv("GPUGUARD_DIR", "")
    gpuguard.grab_gpus(1)

    uuids = [device.uuid for device in gpuguard.snapshot().devices]
    assert len(claimed()) == len(probe(lock_directory(backend="simulated"), uuids))


@pytest.mark.parametrize(
    ("condition", "taken"),
    [
        ({"models": "H100"}, [0]),
        *(({"exclude": given}, [taken]) for given, taken in (("0", 1), (0, 1), ([0, 1], 2))),
        *(({"prefer": given}, [taken]) for given, taken in ((2, 2), ([3, 2], 3))),
        *(({"devices": given}, [taken]) for given, taken in (("2", 2), (1, 1), (range(2, 4), 2), (None, 0))),
    ],
)
def test_a_word_or_an_index_alone_is_a_list_of_one(condition, taken):
    assert indices(gpuguard.select_devices(1, strategy="first", **condition)) == taken
    assert indices(gpuguard.grab_gpus(1, strategy="first", **condition)) == taken


def test_the_name_of_one_device_is_not_read_letter_by_letter(node):
    """exclude="12" left out the devices 1 and 2, and let the job onto 12."""
    start(f"{node}-of-16", "16xH100-80GB")
    free = gpuguard.select_devices(15, backend=f"simulated:{node}-of-16", exclude="12", directory=node)

    assert indices(free) == [*range(12), 13, 14, 15]


def test_a_claim_that_was_given_back_says_so():
    claim = gpuguard.grab_gpus(2)
    assert repr(claim) == f"<Claim {claim.id} of 2, 3>"
    claim.release()
    assert repr(claim) == f"<Claim {claim.id} of 2, 3, released>"


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("model", "models"),
        ("min_memory", "memory"),
        ("device", "devices"),
        ("notes", "note"),
        ("n", "num_gpus"),
        ("gpus", "num_gpus"),
    ],
)
def test_a_condition_that_does_not_exist_is_told_with_the_one_that_may_be_meant(word, meant):
    with pytest.raises(TypeError, match=f"no condition '{word}': did you mean '{meant}'"):
        gpuguard.grab_gpus(1, **{word: "x"})

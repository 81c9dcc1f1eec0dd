"""What people write who ask for devices in Python: a word for a list, an index for a word, a text for a number."""

from __future__ import annotations

import pytest
from grabbing import a_node, claimed, indices  # noqa: F401  (a fixture)
from nodes import start

import gpuguard
from gpuguard.errors import InvalidRequest


@pytest.mark.parametrize(
    ("condition", "taken"),
    [
        ({"models": "H100"}, [0]),
        ({"exclude": "0"}, [1]),
        ({"exclude": 0}, [1]),
        ({"exclude": [0, 1]}, [2]),
        ({"prefer": 2}, [2]),
        ({"prefer": [3, 2]}, [3]),
        ({"devices": "2"}, [2]),
        ({"devices": range(2, 4)}, [2]),
        ({"devices": None}, [0]),
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
    assert repr(claim) == f"<Claim {claim.id} of 2, 3, given back>"


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"num_gpus": "2"}, "num_gpus is a number: '2' is a text"),
        ({"num_gpus": 1.0}, "1.0 GPUs cannot be asked for"),
        ({"wait": "5m"}, "wait is a number of seconds, as in 3600, or None: '5m' is a text"),
        ({"min_free": "20GiB"}, "min_free is a number of bytes"),
        ({"max_util": "10%"}, "max_util is a number of percent"),
        ({"share": True, "memory": "10GiB"}, "memory is a number of bytes"),
        ({"gpu_min_memory": "9000"}, "gpu_min_memory is a number of MiB"),
        ({"alternatives": [{"min_free": "20GiB"}]}, "min_free is a number of bytes"),
    ],
)
def test_a_text_for_a_number_is_refused_in_words(asked, said):
    with pytest.raises(InvalidRequest) as refused:
        gpuguard.grab_gpus(**asked)

    assert said in str(refused.value)
    assert claimed() == []


@pytest.mark.parametrize(
    ("word", "meant"), [("model", "models"), ("min_memory", "memory"), ("device", "devices"), ("notes", "note")]
)
def test_a_condition_that_does_not_exist_is_told_with_the_one_that_may_be_meant(word, meant):
    with pytest.raises(TypeError, match=f"no condition '{word}': did you mean '{meant}'"):
        gpuguard.grab_gpus(1, **{word: "x"})

"""A failure inside of the guest must be seen outside: scripts/guest expects this one to fail."""


def test_this_fails():
    raise AssertionError("planted")
